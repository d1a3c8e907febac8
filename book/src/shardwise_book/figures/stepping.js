(root, data, { part, value, number, sum, escape, box, label, centred, steps }) => {
  // Every number comes from `data`, which Python computed; stepping.py draws and says the same.
  const n = data.devices, cell = 6 * n, left = 52, top = 40, row = 30;
  const column = (device) => left + device * (3 * cell + 8 + 12);
  const range = [...Array(n).keys()];

  function look({ zero, passes, step }) {
    const run = data.runs[zero][passes], held = run.map((one) => sum(one.bytes));
    const peak = held.indexOf(Math.max(...held));
    return { frame: run[step], last: run.length - 1, held, peak, all: run.at(-1).sent };
  }

  function event(frame) {
    const names = frame.layers.map((i) => data.layers[i]);
    if (!names.length) return frame.event;
    return `${frame.event}, ${names.length > 1 ? "all layers" : escape(names[0])}`;
  }

  function describe({ zero, step }, { frame, last, held, peak, all }) {
    const [shards, gathered, gradients, moments] = frame.bytes.map(number);
    const times = Math.floor((all * n) / (data.psi * (n - 1)));
    return `ZeRO ${data.zeros[zero]}. Event <b data-name="step">${step}</b> of ${last}: ` +
      `<b data-name="event">${event(frame)}</b>. Each device holds ` +
      `<b data-name="held">${number(held[step])}</b> bytes: ${shards} of parameters, ${gathered} ` +
      `gathered, ${gradients} of gradients, ${moments} of moments. The peak is ` +
      `<b data-name="peak">${number(held[peak])}</b>, at event ${peak}. It has sent ` +
      `<b data-name="sent">${number(frame.sent)}</b> of <b data-name="all">${number(all)}</b> ` +
      `bytes, ${times}Ψ(n − 1)/n for Ψ = ${number(data.psi)} and n = ${n}.`;
  }

  function fills(frame, zero, kind, layer, device) {
    const own = range.map((i) => Number(i === device)), all = (x) => range.map(() => x);
    if (kind === "P") return zero === 0 || frame.gathered[layer] ? all(1) : own;
    if (kind === "M") return zero === 0 ? all(1) : own;
    return { "": all(0), partial: all(2), whole: all(1), shard: own }[frame.gradients[layer]];
  }

  function moving({ event }) {
    if (event === "update") return "PM";
    return event.endsWith("all-gather") || event.startsWith("forward") ? "P" : "G";
  }

  function strip(x, y, filled, bold) {
    const parts = filled.map((fill, i) => (fill === 0 ? "" :
      `<rect ${box(x + 6 * i, y, 6, 22)} ` +
      `fill="${data.colours[i]}"${fill === 2 ? ' fill-opacity=".4"' : ""}></rect>`));
    const edge = bold ? 'stroke-width="2.5"' : 'stroke-opacity=".45"';
    return `${parts.join("")}<rect class="cell" ${box(x, y, cell, 22)} ` +
      `fill="none" stroke="currentColor" ${edge}></rect>`;
  }

  function gridPicture({ zero }, { frame }) {
    const parts = data.layers.map((name, i) => label(0, top + i * row + 16, escape(name),
      ` font-weight="${frame.layers.includes(i) ? "bold" : "normal"}"`));
    for (const device of range) {
      const x = column(device);
      parts.push(centred(x + 9 * n + 4, 14, `device ${device}`));
      [..."PGM"].forEach((kind, k) => {
        const at = x + k * (cell + 4);
        parts.push(centred(at + 3 * n, 32, kind));
        data.layers.forEach((_, i) => parts.push(strip(
          at,
          top + i * row,
          fills(frame, zero, kind, i, device),
          frame.layers.includes(i) && moving(frame).includes(kind),
        )));
      });
    }
    return parts.join("");
  }

  function coursePicture({ zero, step }, { held, peak }) {
    const width = Math.floor(400 / held.length);
    const tall = (size) => Math.floor((70 * size) / data.most);
    const bars = held.map((size, k) => {
      const high = tall(size), fill = k === step ? "currentColor" : "none";
      return `<rect class="held" ${box(2 + k * width, 100 - high, width - 2, high)} ` +
        `fill="${fill}" stroke="currentColor"></rect>`;
    });
    const ends = peak > Math.floor(held.length / 2); // so that the label stays within the picture
    const x = ends ? peak * width + width : 2 + peak * width, anchor = ends ? "end" : "start";
    const level = '<path d="M2 30H402" stroke="currentColor" stroke-dasharray="1 4"></path>' +
      (zero ? '<text x="2" y="24">peak of data parallelism</text>' : "");
    return `${level}${bars.join("")}` + label(x, 94 - tall(held[peak]),
      `peak, ${number(held[peak])} bytes`, ` text-anchor="${anchor}"`);
  }

  const choose = () => ({ zero: value("zero"), passes: value("passes"), step: 0 });
  steps(choose, (choice) => look(choice).last, (choice) => {
    const answer = look(choice);
    part("result").innerHTML = describe(choice, answer);
    part("grid").innerHTML = gridPicture(choice, answer);
    part("course").innerHTML = coursePicture(choice, answer);
  });
}
