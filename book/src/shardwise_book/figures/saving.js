(root, data, { part, value, live }) => {
  // Every number comes from `data`, which Python computed; saving_drawing.py draws the same.
  const percent = (n) => `${Math.floor(n / 100)}.${String(n % 100).padStart(2, "0")} %`;

  function look({ way, steps, saves, failures, interval }) {
    const shares = data.shares[way][steps][saves][failures];
    return {
      shares,
      best: shares.indexOf(Math.min(...shares)),
      stall: data.stalls[way][steps][saves][interval],
      young: data.young[way][steps][saves][failures],
      lanes: data.lanes[way][steps][saves][interval],
    };
  }

  function describe({ steps, interval }, { shares, best, stall, young }) {
    return `A save every <b data-name="interval">${data.intervals[interval]}</b> steps, or ` +
      `${data.spans[steps][interval]} of training: ` +
      `<b data-name="lost">${percent(shares[interval])}</b> of the time is lost. Training ` +
      `waits for saving in <b data-name="stall">${percent(stall)}</b> of it; the rest ` +
      "goes to failures. Of the intervals here, " +
      `<b data-name="best">${data.intervals[best]}</b> steps lose least, ` +
      `<b data-name="least">${percent(shares[best])}</b>. Young's formula gives ` +
      `<b data-name="young">${young[0]}</b> steps.`;
  }

  function lanesPicture({ lanes: [end, ...boxes] }) {
    const names = ["train", "copy", "write"];
    let drawn = names.map((n, i) => `<text x="0" y="${data.kinds[i + 1][0] + 15}">${n}</text>`).join("");
    for (let i = 0; i < boxes.length; i += 3) {
      const [top, style] = data.kinds[boxes[i]];
      drawn += `<rect x="${boxes[i + 1]}" y="${top}" width="${boxes[i + 2]}" height="22" ` +
        `${style}></rect>`;
    }
    return drawn + `<path d="M${end} 16V104" stroke="currentColor" stroke-width="2"></path>` +
      `<text x="${end}" y="12" text-anchor="end">failure: the pale part is lost</text>`;
  }

  function curvePicture({ interval }, { shares, best, young: [, young] }) {
    const xs = data.xs, most = Math.max(4 * shares[best], 1);
    const ys = shares.map((s) => 150 - Math.floor((110 * Math.min(s, most)) / most));
    const line = xs.map((x, i) => `${x} ${ys[i]}`).join("L");
    const ticks = [0, 3, 6, 9, 12].map((j) =>
      `<text x="${xs[j]}" y="165" text-anchor="middle">${data.intervals[j]}</text>`).join("");
    const marks = [[154, 0], [99, Math.floor(most / 2)], [44, most]].map(([y, n]) =>
      `<text x="40" y="${y}" text-anchor="end">${percent(n).slice(0, -2)}</text>`).join("");
    return `<text x="0" y="12">% of the time lost, cut off at the top</text>${marks}` +
      `<path d="M44 150H344" stroke="currentColor"></path>${ticks}` +
      '<text x="344" y="180" text-anchor="end">steps between saves</text>' +
      `<path d="M${young} 34V150" stroke="currentColor" stroke-dasharray="3 4"></path>` +
      `<text x="${young}" y="30" text-anchor="middle">Young</text>` +
      `<path d="M${line}" fill="none" stroke="${data.line[0]}" stroke-width="2.5"></path>` +
      `<circle cx="${xs[best]}" cy="${ys[best]}" r="6" fill="none" stroke="currentColor" ` +
      `stroke-width="1.5"></circle><circle class="chosen" cx="${xs[interval]}" ` +
      `cy="${ys[interval]}" r="5" fill="${data.line[1]}"></circle>`;
  }

  live(() => {
    const names = ["steps", "saves", "failures", "way", "interval"];
    const choice = Object.fromEntries(names.map((name) => [name, value(name)]));
    const answer = look(choice);
    part("result").innerHTML = describe(choice, answer);
    part("lanes").innerHTML = lanesPicture(answer);
    part("curve").innerHTML = curvePicture(choice, answer);
  });
}
