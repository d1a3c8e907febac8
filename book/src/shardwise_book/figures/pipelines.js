(root, data, { part, value, escape, sum, box, centred, live: start }) => {
  // The orders come from `data`; what follows from them is computed here as in pipelines.py.
  const choice = () => Object.fromEntries(
    Object.keys(data.start).map((key) => [key, value(key)]));
  const rounded = (value, parts) => Math.floor(value * parts + 0.5) / parts;
  const point = (value) => rounded(value, 100);
  const [LEFT, WIDTH, ROW, TOP, HIGH] = data.sizes;

  function read(chosen) {
    const found = data.orders[chosen.schedule][chosen.devices][chosen.microbatches];
    if (typeof found === "string") return found;
    const [homes, letters] = found;
    const stages = letters.map((_, d) => homes.flatMap((home, stage) => home === d ? [stage] : []));
    const orders = letters.map((text, d) => text.match(/../g).map((pair) => {
      const kind = pair[0].toUpperCase(), chunk = pair[0] === kind ? 0 : 1;
      return { kind, chunk, stage: stages[d][chunk], device: d, k: parseInt(pair[1], 36) };
    }));
    const tasks = new Map(orders.flat().map((task) => [key(task), task]));
    orders.flat().forEach((task) => { task.needs = needs(task, tasks, homes.length); });
    return { orders, share: orders.length / homes.length };
  }

  const key = ({ kind, stage, k }) => `${kind} ${stage} ${k}`;

  function needs({ kind, stage, k }, tasks, stages) {
    const at = (kind, stage) => tasks.get(key({ kind, stage, k }));
    if (kind === "W") return [at("I", stage)];
    if (kind === "F") return stage ? [at("F", stage - 1)] : [];
    const after = stage < stages - 1 ? [at("I", stage + 1) ?? at("B", stage + 1)] : [];
    return [at("F", stage), ...after];
  }

  function time({ orders, share }, backward, transfer) {
    const half = (backward * share) / 2;
    const costs = { F: share, B: backward * share, I: half, W: half };
    const next = orders.map(() => 0), free = orders.map(() => 0);
    for (let moved = true; moved;) {
      moved = false;
      orders.forEach((order, d) => {
        for (; next[d] < order.length; next[d]++) {
          const task = order[next[d]];
          if (task.needs.some((need) => need.end === undefined)) break;
          const arrivals = task.needs.map((need) => need.end + (need.device === d ? 0 : transfer));
          task.free = free[d];
          task.start = Math.max(free[d], ...arrivals);
          task.end = free[d] = task.start + costs[task.kind];
          moved = true;
        }
      });
    }
    return Math.max(...free);
  }

  // [time, how many from then on], as `live` of schedules.Timeline has them.
  function counts(order, opening, closing) {
    const events = order.flatMap((task) =>
      opening[task.kind] ? [[task[opening[task.kind]], 1]]
        : closing.includes(task.kind) ? [[task.end, -1]] : []);
    events.sort((a, b) => a[0] - b[0] || a[1] - b[1]); // what ends makes room first
    const found = new Map([[0, 0]]);
    let number = 0;
    events.forEach(([time, change]) => found.set(time, (number += change)));
    return [...found];
  }

  const most = (changes) => Math.max(...changes.map(([, number]) => number));
  const live = (order) => counts(order, { F: "start" }, "BW");

  const name = ({ kind, stage, k }) => `${kind} of stage ${stage}, microbatch ${k}`;

  function describe({ orders, share }, makespan, chosen) {
    const busy = sum(orders.flat().map((task) => task.end - task.start));
    const bubble = rounded(100 * (1 - busy / (makespan * orders.length)), 10);
    const peaks = orders.map((order) => share * most(live(order))).join(", ");
    const pending = orders.map((order) => share * most(counts(order, { I: "end" }, "W"))).join(", ");
    const wait = chosen.start - chosen.free;
    return `Makespan <b data-name="makespan">${makespan}</b>, bubble ` +
      `<b data-name="bubble">${bubble} %</b>. At most live, in microbatches through all layers ` +
      `of a device: <b data-name="peaks">${peaks}</b>; waiting for W: ` +
      `<b data-name="pending">${pending}</b>.<br>` +
      `<b>${name(chosen)}</b> on device ${chosen.device} runs from ${chosen.start} to ` +
      `${chosen.end}. It needs ` +
      (chosen.needs.map((need) =>
        `${name(need)}, done at ${need.end} on device ${need.device}`).join(" and ") || "nothing") +
      `; the device is free from ${chosen.free}${wait ? ` and waits ${wait}.` : "."}`;
  }

  const rect = (x, y, width, height, more) =>
    `<rect ${box(point(x), y, point(width), height)} ${more}></rect>`;
  const row = (task) => TOP + ROW * task.device;

  function drawTask(task, position, scale) {
    const x = LEFT + scale * task.start, wide = scale * (task.end - task.start), y = row(task);
    const ink = `fill="${data.inks[task.kind]}" pointer-events="none"`;
    const label = wide >= 8 * String(task.k).length + 2
      ? `<text x="${point(x + wide / 2)}" y="${y + 17}" text-anchor="middle" ${ink}>${task.k}</text>`
      : "";
    return rect(x, y, wide - Math.min(1, wide / 6), 26,
      `data-device="${task.device}" data-task="${position}" fill="${data.colours[task.kind]}"`) +
      label + (task.chunk ? rect(x + wide / 8, y + 21, (3 * wide) / 4, 2, ink) : "");
  }

  function waits(chosen, scale) {
    const outline = (task, dashes) => rect(
      LEFT + scale * task.start, row(task), scale * (task.end - task.start), 26,
      `fill="none" stroke="currentColor" stroke-width="2.5"${dashes} pointer-events="none"`);
    const line = (need) => need.device === chosen.device ? "" // it would hide the numbers between
      : `<line x1="${point(LEFT + scale * need.end)}" y1="${row(need) + 13}" ` +
        `x2="${point(LEFT + scale * chosen.start)}" y2="${row(chosen) + 13}" ` +
        'stroke="currentColor" stroke-width="2" pointer-events="none"></line>';
    return chosen.needs.map((need) => outline(need, ' stroke-dasharray="4 2"') + line(need))
      .join("") + outline(chosen, "");
  }

  // What is live on a device, as an area under its row; the highest of any device fills it.
  function area(changes, device, scale, highest) {
    const foot = TOP + ROW * device + 26 + HIGH;
    const steps = changes.map(([time, number]) =>
      `H${point(LEFT + scale * time)}V${point(foot - (HIGH * number) / highest)}`);
    return `<path class="live" d="M${LEFT} ${foot}${steps.join("")}Z" fill="currentColor" ` +
      'opacity=".45"></path>';
  }

  function picture({ orders }, makespan, chosen) {
    const scale = WIDTH / makespan, y = TOP + ROW * orders.length + 14;
    const lives = orders.map(live), highest = Math.max(...lives.map(most));
    const rows = orders.map((order, d) =>
      `<text x="${LEFT - 8}" y="${TOP + ROW * d + 18}" text-anchor="end">${d}</text>` +
      rect(LEFT, TOP + ROW * d, WIDTH, 26, 'class="waits" fill="currentColor" opacity=".12"') +
      order.map((task, position) => drawTask(task, position, scale)).join("") +
      area(lives[d], d, scale, highest));
    const step = Math.max(1, Math.floor(makespan / 4)), axis = [];
    for (let tick = 0; tick <= makespan; tick += step) axis.push(centred(point(LEFT + scale * tick), y, tick));
    return rows.join("") + waits(chosen, scale) + axis.join("");
  }

  function update() {
    const chosen = choice(), made = read(chosen);
    part("device").max = data.offered.devices[chosen.devices] - 1; // moves it, if it must
    if (typeof made === "string") {
      part("result").innerHTML = `<span class="error">${escape(made)}</span>`;
      part("timeline").innerHTML = "";
      return;
    }
    const order = made.orders[value("device")];
    part("task").max = order.length - 1;
    const makespan = time(made, data.offered.backward[chosen.backward],
      data.offered.transfer[chosen.transfer]);
    const task = order[value("task")];
    const height = TOP + ROW * made.orders.length + 20;
    part("timeline").setAttribute("viewBox", `0 0 ${LEFT + WIDTH + 18} ${height}`);
    part("timeline").innerHTML = picture(made, makespan, task);
    part("result").innerHTML = describe(made, makespan, task);
  }

  function pointAt({ target }) {
    const { device, task } = target.dataset ?? {};
    if (task === undefined || (part("device").value === device && part("task").value === task)) {
      return;
    }
    part("device").value = device;
    part("task").max = task; // until update: the order before may be shorter
    part("task").value = task;
    update();
  }

  part("timeline").addEventListener("pointerover", pointAt); // a finger too, as it touches
  start(update);
}
