(root, data, { part, value, escape, sum, live }) => {
  // Python computed every number; this chooses, and draws what plans.py draws.
  const wide = 322, most = 0.72, top = 76, row = 34;
  const point = (x) => Math.floor(x * 10 + 0.5) / 10;
  const box = (x, y, w, h, colour) => `<rect x="${point(x)}" y="${y}" width="${point(w)}" ` +
    `height="${h}" fill="${colour}" stroke="currentColor" stroke-width=".5"></rect>`;
  const text = (x, y, words, more = "") => `<text x="${x}" y="${y}"${more}>${words}</text>`;

  function drawn(held, room, seconds) {
    const scale = most * wide / room, longest = Math.max(...seconds), boxes = [];
    let at = 0;
    held.forEach((size, i) => {
      const start = point(Math.min(wide, at * scale));
      const end = point(Math.min(wide, (at + size) * scale));
      boxes.push(box(4 + start, 18, end - start, 22, data.colours[i]));
      at += size;
    });
    const full = point(4 + most * wide);
    boxes.push(`<path d="M${full} 14v30" stroke="currentColor" stroke-width="2"></path>`);
    boxes.push(text(full, 11, "full", ' text-anchor="middle"') + text(4, 11, "Memory"));
    boxes.push(text(4, 64, "Seconds of a step"));
    seconds.forEach((s, i) => {
      const y = top + i * row, colour = s < longest ? data.grey : data.binding;
      boxes.push(text(4, y + 9, `${escape(data.terms[i])}: ${s}`));
      boxes.push(box(4, y + 14, point(wide * s / longest), 12, colour));
    });
    return boxes.join("");
  }

  function words(name, held, room, seconds, step, mfu) {
    const keys = data.parts.map((part, i) => '<span class="key">' +
      `<span style="background:${data.colours[i]}"></span> ${escape(part)} ${held[i]}</span>, `);
    const total = Math.floor(sum(held) * 10 + 0.5) / 10;
    const binds = data.terms[seconds.indexOf(Math.max(...seconds))];
    return `<b>${escape(name)}</b>: ${keys.join("")}in all <b data-name="held">${total}</b> GiB of ` +
      `${room}, which <b data-name="fits">${total <= room ? "fits" : "does not fit"}</b>. ` +
      `A step takes ${step} s, MFU at most <b data-name="mfu">${mfu}</b> %; ` +
      `<b data-name="binds">${escape(binds)}</b> binds.`;
  }

  live(() => {
    const at = data.sizes.reduce((sum, size, i) => sum * size + value(`choice${i}`), 0);
    const frame = data.frames[at], none = typeof frame === "number";
    part("bars").innerHTML = "";
    if (none) {
      part("result").innerHTML = `<span class="error">${escape(data.told[frame])}</span>`;
      return;
    }
    const [name, ...numbers] = frame, n = data.parts.length;
    const [step, mfu] = numbers.slice(-2), seconds = numbers.slice(n + 1, -2);
    const held = numbers.slice(0, n), room = numbers[n];
    part("bars").innerHTML = drawn(held, room, seconds);
    part("result").innerHTML = words(name, held, room, seconds, step, mfu);
  });
}
