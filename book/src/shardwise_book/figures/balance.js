(root, data, { part, value, sum, escape, live }) => {
  // Every number comes from `data`, which Python computed; balance.py draws and says the same.
  const keys = ["order", "devices", "length", "mask"];
  const chosen = (c) => keys.reduce((found, key) => found[c[key]], data.work);
  const steps = (scores) => scores.map((_, t) => Math.max(...scores.map((row) => row[t])));
  const thousandths = (n) => `${Math.floor(n / 1000)}.${String(n % 1000).padStart(3, "0")}`;

  const rounded = (a, b) => Math.floor((2 * a + b) / (2 * b));

  function describe(c) {
    const scores = chosen(c), n = scores.length, takes = sum(steps(scores));
    const total = sum(scores.map(sum));
    const [order, , length, mask] = keys.map((key, i) => escape(data.options[i][c[key]]));
    const mean = rounded(total, n), waits = rounded(100 * (n * takes - total), n * takes);
    return `<b>${order}</b>, ${length} tokens on ${n} devices, ${mask}: ` +
      `<b data-name="mean">${mean}</b> scores for a device on average, and the ring ` +
      `takes as long as <b data-name="takes">${takes}</b> of them. Devices wait for others ` +
      `<b data-name="waits">${waits}</b> % of the time. Each sends, forward: ` +
      `${data.sent[c.devices][c.length]}.`;
  }

  function seen(c) {
    const size = data.lengths[c.length], runs = data.runs[c.length][c.mask];
    const paths = Array(data.devices[c.devices]).fill("");
    data.owners[c.order][c.devices][c.length].forEach((owner, token) => {
      paths[owner] += `M${token} -4h1v3h-1z`;
      for (let i = 0; i < runs[token].length; i += 2) {
        const [first, count] = runs[token].slice(i, i + 2);
        paths[owner] += `M${first} ${token}h${count}v1h-${count}z`;
      }
    });
    const drawn = paths.map((d, i) => `<path fill="${data.colours[i]}" d="${d}"></path>`).join("");
    return '<text x="15" y="11">keys</text><text transform="translate(11 60) rotate(-90)" ' +
      'text-anchor="end">queries</text><g transform="translate(15 26) ' +
      `scale(${thousandths(Math.floor(200000 / size))})">${drawn}` +
      `<path d="M0 0h${size}v${size}h-${size}z" fill="none" stroke="currentColor" ` +
      'stroke-width=".2"></path></g>';
  }

  function ring(c) {
    const scores = chosen(c), all = data.work.map((_, order) => chosen({ ...c, order }));
    const longest = Math.max(...all.map((other) => sum(steps(other))));
    const starts = [0];
    steps(scores).forEach((long, t) => starts.push(starts[t] + long));
    const rows = scores.map((row, r) => {
      const bars = row.map((n, t) => n ? `M${starts[t]} ${r * 24 + 3}h${n}v18h-${n}z` : "");
      return `<path fill="${data.colours[r]}" d="${bars.join("")}"></path>`;
    }).join("");
    const names = scores.map((_, r) => `<text x="0" y="${r * 24 + 32}">device ${r}</text>`);
    const lines = starts.map((x) => `M${x} 0v${24 * scores.length}`).join("");
    return `<text x="58" y="11">time →</text>${names.join("")}<g transform="translate(58 15) ` +
      `scale(${thousandths(Math.floor(262000 / longest))} 1)">${rows}<path d="${lines}" ` +
      'fill="none" stroke="currentColor" stroke-dasharray="2 2" ' +
      'vector-effect="non-scaling-stroke"></path></g>';
  }

  live(() => {
    const choice = Object.fromEntries(keys.map((key) => [key, value(key)]));
    part("result").innerHTML = describe(choice);
    part("seen").innerHTML = seen(choice);
    part("ring").innerHTML = ring(choice);
    const high = 24 * data.devices[choice.devices] + 18;
    part("ring").setAttribute("viewBox", `0 0 320 ${high}`);
  });
}
