(root, data, { part, value, live }) => {
  // Python has drawn the graph and found the slices; this only lights one.
  const graph = part("graph");
  const nodes = [...graph.querySelectorAll(".node")], edges = [...graph.querySelectorAll(".edge")];

  function update() {
    const { on, read, words, colours } = data.slices[value("slice")];
    nodes.forEach((node, i) => {
      node.classList.toggle("on", on.includes(i));
      node.classList.toggle("read", read.includes(i));
    });
    edges.forEach((edge, i) => edge.classList.toggle("on", on.includes(data.edges[i][1])));
    ["--lit", "--ink"].forEach((name, i) => graph.style.setProperty(name, colours[i]));
    part("result").innerHTML = words;
  }

  // A click on a box chooses the slice that computes it.
  graph.addEventListener("click", ({ target }) => {
    const node = target.closest(".node");
    const owner = node ? data.owners[node.dataset.node] : null;
    if (owner === null) return;
    part("slice").value = owner;
    update();
  });
  live(update);
}
