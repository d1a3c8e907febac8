(root, data, { part, value, number, sum, live }) => {
  // Every number comes from `data`, which Python computed; loads.py draws the same.
  const names = ["experts", "per_token", "capacity", "skew", "devices"];

  function look() {
    const [experts, k, capacity, skew, devices] = names.map(value);
    const [wanted, kept, slots] = data.routed[experts][k][capacity][skew];
    const [exchanged, gathered] = data.sent[experts][k][capacity][devices];
    return { wanted, kept, slots, exchanged, gathered, devices: data.devices[devices] };
  }

  function describe({ wanted, kept, exchanged, gathered }) {
    const choices = sum(wanted), taken = sum(kept);
    const lost = Math.floor((1000 * (choices - taken) + Math.floor(choices / 2)) / choices);
    const sent = exchanged
      ? `<b data-name="exchanged">${number(exchanged)}</b> bytes by an all-to-all there and back, `
      : "without a capacity there is no all-to-all of fixed size; ";
    const less = exchanged && exchanged < gathered ? "all-to-all" : "gather";
    return `<b data-name="choices">${number(choices)}</b> choices; the busiest expert has ` +
      `<b data-name="busiest">${Math.max(...wanted)}</b>, an even share is ` +
      `${Math.floor(choices / wanted.length)}. Dropped: ` +
      `<b data-name="dropped">${choices - taken}</b> (${Math.floor(lost / 10)}.${lost % 10} %). ` +
      `A device sends ${sent}` +
      `<b data-name="gathered">${number(gathered)}</b> bytes by a gather and a scatter: ` +
      `<b data-name="less">${less}</b> sends less.`;
  }

  function picture({ wanted, kept, slots, devices }) {
    const n = wanted.length, most = Math.max(...wanted, slots ?? 0), wide = Math.floor(328 / n);
    const bars = wanted.map((all, i) => {
      const x = 36 + i * wide, colour = data.colours[Math.floor((i * devices) / n)];
      const taken = Math.floor((140 * kept[i]) / most), whole = Math.floor((140 * all) / most);
      return `<rect x="${x}" y="${168 - whole}" width="${wide - 3}" ` +
        `height="${whole - taken}" fill="none" stroke="currentColor" ` +
        `stroke-dasharray="2 2"></rect><rect x="${x}" y="${168 - taken}" ` +
        `width="${wide - 3}" height="${taken}" fill="${colour}"></rect>` +
        `<text x="${x + Math.floor((wide - 3) / 2)}" y="183" text-anchor="middle">${i}</text>`;
    });
    if (slots !== null) {
      const y = 168 - Math.floor((140 * slots) / most);
      bars.push('<path d="M32 ' + `${y}H364" stroke="currentColor" stroke-width="1.5"></path>` +
        `<text x="30" y="${y + 4}" text-anchor="end">${slots}</text>`);
    }
    return '<text x="0" y="12">choices by expert; dashed: dropped' +
      `${slots === null ? "" : "; line: slots"}</text>` +
      '<path d="M36 168H364" stroke="currentColor"></path>' +
      `${bars.join("")}<text x="364" y="199" text-anchor="end">` +
      `experts; a colour is one of ${devices} devices</text>`;
  }

  live(() => {
    const answer = look();
    part("result").innerHTML = describe(answer);
    part("loads").innerHTML = picture(answer);
  });
}
