(root, data, { part, value, live }) => {
  // Python drew every column of blocks and wrote every sentence; products.py says what they show.
  live(() => {
    const chosen = ["sizes", "left", "right"].map((name, i) => value(name) * data.strides[i]);
    const [words, columns] = data.frames[chosen[0] + chosen[1] + chosen[2]];
    part("blocks").innerHTML = columns.map((number) => data.columns[number]).join("");
    part("result").innerHTML = words;
  });
}
