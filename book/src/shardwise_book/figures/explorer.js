(root, data, { part, value, escape, offer, live }) => {
  // Every number comes from `data`, which Python computed with JAX; layouts.py says how to read it.
  let offered = data.start.mesh; // the mesh whose entries the selects offer
  const set = (element, attributes) => {
    for (const [name, to] of Object.entries(attributes)) element.setAttribute(name, to);
  };

  function look(choice, shape, spec) {
    const found = choice.specs[spec[0] * choice.entries.length + spec[1]];
    const number = data.sizes.indexOf(shape[0]) * data.sizes.length + data.sizes.indexOf(shape[1]);
    const error = typeof found === "number" ? found : found[2][number];
    const name = `${data.prefix}(${spec.map((i) => choice.entries[i]).join(", ")})`;
    if (error !== undefined) {
      return { name, error: message(choice, shape, name, found[0], data.errors[error]) };
    }
    const [[down, across], tiles] = found;
    const height = shape[0] / down, width = shape[1] / across;
    const blocks = [...tiles].map(Number).map((tile) => {
      const y = Math.floor(tile / across) * height, x = (tile % across) * width;
      return [y, y + height, x, x + width];
    });
    return { name, blocks, bytes: height * width * data.itemsize, copies: 8 / (down * across) };
  }

  function message(choice, shape, name, grid, text) {
    let slots = { "{mesh}": choice.repr, "{spec}": name };
    if (grid) {
      const axis = shape[0] % grid[0] ? 0 : 1;
      slots = {
        ...slots,
        "{shape}": `(${shape[0]}, ${shape[1]})`,
        "{grid}": `${grid[0]}, ${grid[1]}`,
        "{cut}": `axis ${axis} is partitioned ${grid[axis]} times`,
        "{size}": `size is ${shape[axis]}`,
      };
    }
    for (const [slot, by] of Object.entries(slots)) text = text.replaceAll(slot, by);
    return text;
  }

  function describe(answer, shape, device) {
    const name = `<code>${answer.name}</code>`;
    if (answer.error) {
      return `JAX refuses ${name}: <span data-name="error">${escape(answer.error)}</span>`;
    }
    const [top, bottom, left, right] = answer.blocks[device];
    return `${name}: each device holds <b data-name="block">${bottom - top}×${right - left}</b> of ` +
      `${shape[0]}×${shape[1]} float32 elements, <b data-name="bytes">${answer.bytes}</b> of ` +
      `${shape[0] * shape[1] * data.itemsize} bytes. Each element lies on ` +
      `<b data-name="copies">${answer.copies}</b> of 8 devices. Device ${device} holds ` +
      `<b data-name="held">[${top}:${bottom}, ${left}:${right}]</b>.`;
  }

  function drawArray(blocks, [rows, columns], device) {
    const svg = part("array"), unit = 250 / Math.max(rows, columns);
    const names = svg.querySelectorAll(".name"), pick = svg.querySelector(".pick");
    svg.querySelectorAll(".block").forEach((box, i) => {
      box.style.display = names[i].style.display = blocks ? "" : "none";
      if (!blocks) return;
      const [top, bottom, left, right] = blocks[i];
      const holders = blocks.flatMap((other, j) => (`${other}` === `${blocks[i]}` ? [j] : []));
      const strip = ((right - left) * unit - 3) / holders.length; // blocks stand 3 apart
      const x = 41.5 + left * unit + holders.indexOf(i) * strip, height = (bottom - top) * unit - 3;
      set(box, { x, y: 31.5 + top * unit, width: strip, height });
      set(names[i], { x: x + strip / 2, y: 35.5 + top * unit + height / 2 });
    });
    const line = (i) => `M${40 + i * unit} 30v${rows * unit}`;
    const across = (i) => `M40 ${30 + i * unit}h${columns * unit}`;
    const count = (n, draw) => [...Array(n - 1).keys()].map((i) => draw(i + 1)).join("");
    set(svg.querySelector(".lines"), { d: count(columns, line) + count(rows, across) });
    const edge = { width: columns * unit, height: rows * unit };
    set(svg.querySelector(".edge"), { ...edge, "stroke-dasharray": blocks ? "none" : "5 4" });
    set(svg.querySelector(".across"), { x: 40 + edge.width / 2 });
    const turned = `translate(32 ${30 + edge.height / 2}) rotate(-90)`;
    set(svg.querySelector(".down"), { transform: turned });
    svg.querySelector(".across").textContent = `${columns} columns`;
    svg.querySelector(".down").textContent = `${rows} rows`;
    pick.style.display = blocks ? "" : "none";
    if (blocks) {
      const [top, bottom, left, right] = blocks[device].map((n) => n * unit);
      set(pick, { x: 40 + left, y: 30 + top, width: right - left, height: bottom - top });
    }
    const held = blocks?.map(([t, b, x, y], i) => `device ${i} [${t}:${b}, ${x}:${y}]`);
    set(svg, { "aria-label": held ? `Blocks held: ${held.join(", ")}` : "No layout" });
  }

  function drawMemories(blocks, [rows, columns], device, choice) {
    const svg = part("memories"), unit = 62 / Math.max(rows, columns);
    const outlines = svg.querySelectorAll(".memory"), places = svg.querySelectorAll(".place");
    svg.querySelectorAll(".block").forEach((box, i) => {
      const x = (i % 4) * 82 + 8, y = Math.floor(i / 4) * 118 + 58;
      box.style.display = blocks ? "" : "none";
      if (blocks) {
        const [top, bottom, left, right] = blocks[i].map((n) => n * unit);
        set(box, { x: x + left, y: y + top, width: right - left, height: bottom - top });
      }
      const thick = i === device ? 3 : 0.8;
      set(outlines[i], { width: columns * unit, height: rows * unit, "stroke-width": thick });
      places[i].textContent = choice.places[i];
    });
    svg.querySelector(".axes").textContent = `place in the mesh: (${choice.axes.join(", ")})`;
  }

  function update() {
    if (value("mesh") !== offered) offerEntries(); // an input event comes before its change event
    const choice = data.meshes[value("mesh")], device = value("device");
    const shape = ["rows", "columns"].map((name) => data.sizes[value(name)]);
    const answer = look(choice, shape, [value("first"), value("second")]);
    part("result").innerHTML = describe(answer, shape, device);
    part("result").classList.toggle("error", Boolean(answer.error));
    drawArray(answer.blocks, shape, device);
    drawMemories(answer.blocks, shape, device, choice);
  }

  function offerEntries() {
    // Another mesh has other axes: keep an entry that it has too.
    const before = data.meshes[offered].entries;
    offered = value("mesh");
    for (const name of ["first", "second"]) offer(name, before, data.meshes[offered].entries);
  }

  live(update);
}
