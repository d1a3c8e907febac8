(root, data, { part, value, live }) => {
  // Python drew every frame; this chooses.
  live(() => {
    const layout = data.frames[value("layout")], device = layout.devices[value("device")];
    part("sums").innerHTML = layout.sums;
    part("blocks").innerHTML = device.blocks;
    part("result").innerHTML = device.words;
    part("sends").innerHTML = layout.sends;
  });
}
