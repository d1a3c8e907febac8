(root, data, { part, value, number, sum, escape, box, centred, steps }) => {
  // Every number comes from `data`, which Python computed; ring.py draws and says the same.
  const bits = (mark) => mark.toString(2).replaceAll("0", "").length;

  function look({ kind, n, step }) {
    const run = data.kinds[kind].runs[data.sizes.indexOf(n)], block = data.payload / n;
    const first = run.moves.map((moves) => moves.filter(([source]) => source === 0).length);
    return {
      held: run.held[step],
      moves: step ? run.moves[step - 1] : [],
      steps: run.moves.length,
      block,
      sent: block * sum(first.slice(0, step)),
      all: block * sum(first),
    };
  }

  function describe({ kind, n, step }, answer) {
    const { name, adds } = data.kinds[kind];
    const turns = Math.floor((answer.all * n) / (data.payload * (n - 1)));
    const words = [
      `${escape(name.slice(0, 1).toUpperCase() + name.slice(1))} on ${n} devices, after <b data-name="step">` +
        `${step}</b> of <b data-name="steps">${answer.steps}</b> steps.`,
    ];
    for (const [source, target, slot, count] of answer.moves) {
      if (source !== 0) continue;
      const what = `block ${slot}` + (adds ? `, ${count} of ${n} added up,` : "");
      words.push(`Device ${source} has just sent ${what} to device ${target}.`);
    }
    words.push(
      `Each device has sent <b data-name="sent">${number(answer.sent)}</b> of ` +
        `<b data-name="all">${number(answer.all)}</b> bytes: ${turns === 1 ? "" : turns}B(n − 1)/n ` +
        `for B = ${number(data.payload)}, in blocks of ` +
        `<b data-name="block">${number(answer.block)}</b>.`,
    );
    return words.join(" ");
  }

  function bar(adds, n, [left, top], slot, mark, arrived) {
    const width = Math.floor(64 / n), count = bits(mark), sender = mark ? 31 - Math.clz32(mark) : -1;
    const x = left - Math.floor((width * n) / 2) + slot * width, y = top - 18;
    const high = adds ? Math.floor((36 * count) / n) : 36 * Math.min(count, 1);
    const colour = data.colours[adds ? slot : Math.max(sender, 0)];
    const label = adds ? count : sender < 0 ? "" : sender;
    const frame = arrived ? 'stroke-width="2.5"' : 'stroke-opacity=".5"';
    return `<rect ${box(x, y + 36 - high, width, high)} fill="${colour}"></rect>` +
      `<rect class="block" ${box(x, y, width, 36)} ` +
      `fill="none" stroke="currentColor" ${frame}></rect><text x="${x + width / 2}" ` +
      `y="${y + 48}" text-anchor="middle">${label}</text>`;
  }

  function ringPicture({ kind, n }, answer) {
    const i = data.sizes.indexOf(n), { adds } = data.kinds[kind], parts = [];
    const arrived = new Set(answer.moves.map(([, target, slot]) => `${target} ${slot}`));
    for (const pair of new Set(answer.moves.map(([source, target]) => `${source} ${target}`))) {
      const [source, target] = pair.split(" "), [line, head] = data.arrows[i][source][target];
      parts.push(`<path class="move" d="${line}" stroke="currentColor" stroke-width="3"></path>` +
        `<path d="${head}"></path>`);
    }
    answer.held.forEach((blocks, device) => {
      const [x, y] = data.places[i][device];
      parts.push(`<circle cx="${x}" cy="${y}" r="46" fill="none" stroke="currentColor"></circle>` +
        centred(x, y - 24, `device ${device}`));
      blocks.forEach((mark, slot) => {
        parts.push(bar(adds, n, [x, y], slot, mark, arrived.has(`${device} ${slot}`)));
      });
    });
    return parts.join("");
  }

  const choose = () => ({ kind: value("kind"), n: data.sizes[value("n")], step: 0 });
  steps(choose, (choice) => look(choice).steps, (choice) => {
    const answer = look(choice);
    part("result").innerHTML = describe(choice, answer);
    part("ring").innerHTML = ringPicture(choice, answer);
  });
}
