(root, data, { part, value, live }) => {
  // Python drew every piece and wrote every sentence; blocks.py says what they show.
  live(() => {
    const chosen = data.names.map((name, i) => value(name) * data.strides[i]);
    const frame = data.frames[chosen.reduce((a, b) => a + b, 0)], order = value("order");
    const drawn = [...frame.pieces, frame.labels[order]];
    part("block").innerHTML = drawn.map((number) => data.pieces[number]).join("");
    part("result").innerHTML = frame.words[order];
  });
}
