(root, data, { part, value, number, sum, escape, box, centred, offer, live }) => {
  // Every number comes from `data`, which Python computed; resharding.py draws and says the same.
  const offered = [data.start.from[0], data.start.onto[0]]; // the meshes whose specs are offered

  function touched(stored, [top, bottom, left, right]) {
    const [height, width] = stored.chunk, across = Math.ceil(data.shape[1] / width), found = [];
    for (let i = Math.floor(top / height); i < Math.ceil(bottom / height); i++) {
      for (let j = Math.floor(left / width); j < Math.ceil(right / width); j++) {
        found.push(i * across + j);
      }
    }
    return found;
  }

  function ranges(places) {
    const joined = [];
    for (const [file, offset, size] of places.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
      const last = joined.at(-1);
      if (last && last[0] === file && last[2] === offset) last[2] += size;
      else joined.push([file, offset, offset + size]);
    }
    return joined;
  }

  function look(choice) {
    const stored = data.saved[choice.limit][choice.from[0]][choice.from[1]];
    const blocks = data.meshes[choice.onto[0]].blocks[choice.onto[1]];
    const reads = blocks.map((block) => touched(stored, block));
    const sizes = reads.map((chunks) => sum(chunks.map((i) => stored.places[i][2])));
    const [top, bottom, left, right] = blocks[choice.device];
    return {
      stored,
      block: blocks[choice.device],
      touched: reads[choice.device],
      held: (bottom - top) * (right - left) * data.itemsize,
      read: sizes[choice.device],
      ranges: ranges(reads[choice.device].map((i) => stored.places[i])),
      all: sum(sizes),
    };
  }

  function name([mesh, spec]) {
    return `<code>${escape(`${data.meshes[mesh].label}, ${data.meshes[mesh].specs[spec]}`)}</code>`;
  }

  function describe(choice, answer) {
    const [top, bottom, left, right] = answer.block, { chunk, files, places } = answer.stored;
    const shown = answer.ranges.slice(0, 3).map(([f, a, b]) =>
      `bytes ${number(a)} to ${number(b)} of ${escape(files[f])}`);
    if (answer.ranges.length > 3) shown.push(`and ${answer.ranges.length - 3} more`);
    return `Saved from ${name(choice.from)}: <b data-name="chunks">${places.length}</b> ` +
      `chunks of <b data-name="chunk">${chunk[0]}×${chunk[1]}</b> elements. Restored onto ` +
      `${name(choice.onto)}: device ${choice.device} holds ` +
      `<b data-name="block">[${top}:${bottom}, ${left}:${right}]</b>, ` +
      `<b data-name="held">${number(answer.held)}</b> bytes, touches ` +
      `<b data-name="touched">${answer.touched.length}</b> chunks and reads ` +
      `<b data-name="read">${number(answer.read)}</b> bytes as stored ` +
      `(<span data-name="ranges">${shown.join("; ")}</span>). The whole mesh reads ` +
      `<b data-name="all">${number(answer.all)}</b> bytes.`;
  }

  const rect = (kind, place, fill, more = "") =>
    `<rect class="${kind}" ${place} fill="${fill}" stroke="currentColor"${more}></rect>`;

  function arrayPicture(choice, answer) {
    const [rows, columns] = data.shape, [height, width] = answer.stored.chunk;
    const across = Math.ceil(columns / width), [top, bottom, left, right] = answer.block;
    const boxes = answer.stored.places.map((_, i) => rect(
      "chunk",
      box(30 + (i % across) * width, 30 + Math.floor(i / across) * height, width, height),
      answer.touched.includes(i) ? data.colours[choice.device] : "none",
    ));
    return centred(30 + Math.floor(columns / 2), 20, `${columns} columns`) +
      '<text text-anchor="middle" ' +
      `transform="translate(20 ${30 + Math.floor(rows / 2)}) rotate(-90)">${rows} rows</text>` +
      boxes.join("") +
      rect("held", box(30 + left, 30 + top, right - left, bottom - top), "none", ' stroke-width="5"');
  }

  function filePicture(choice, answer) {
    const { files, places } = answer.stored;
    return files.map((file, f) => {
      const inside = places.map((place, i) => [i, place]).filter(([, place]) => place[0] === f);
      const size = Math.max(...inside.map(([, place]) => place[1] + place[2])), y = 60 * f + 40;
      const at = (byte) => Math.floor((byte * 300) / size);
      return `<text x="10" y="${y - 10}">${escape(file)}, ${number(size)} bytes</text>` +
        inside.map(([i, [, offset, length]]) => rect(
          "bytes",
          box(10 + at(offset), y, at(offset + length) - at(offset), 26),
          answer.touched.includes(i) ? data.colours[choice.device] : "none",
        )).join("");
    }).join("");
  }

  function offerSpecs(end) {
    // Another mesh has other axes: keep a spec that it has too.
    const mesh = value(`mesh${end}`), before = data.meshes[offered[end]].specs;
    if (mesh === offered[end]) return;
    offered[end] = mesh;
    offer(`spec${end}`, before, data.meshes[mesh].specs);
  }

  function update() {
    [0, 1].forEach(offerSpecs);
    const from = [value("mesh0"), value("spec0")], onto = [value("mesh1"), value("spec1")];
    part("device").max = data.meshes[onto[0]].blocks[onto[1]].length - 1; // moves it, if it must
    const choice = { limit: value("limit"), from, onto, device: value("device") };
    const answer = look(choice);
    part("result").innerHTML = describe(choice, answer);
    part("array").innerHTML = arrayPicture(choice, answer);
    part("file").innerHTML = filePicture(choice, answer);
  }

  live(update);
}
