(root, data, { part, value, offer, live }) => {
  // Every number comes from `data`, which Python computed; lanes_drawing.py draws the same.
  const point = (value) => Math.floor(value * 100 + 0.5) / 100;
  let offered = data.start.strategy; // the strategy whose ways to overlap are on offer

  function box(x, wide, kind, layer) {
    const [top, tall, down, style, ink] = data.kinds[kind];
    const place = `x="${point(x)}" y="${point(top + down * layer)}"`;
    const made = `<rect ${place} width="${point(wide)}" height="${tall}" ${style}></rect>`;
    if (!ink || wide < 9) return made;
    const middle = `x="${point(x + wide / 2)}" y="${top + 17}" text-anchor="middle"`;
    return `${made}<text ${middle} fill="${ink}">${layer}</text>`;
  }

  function picture(strategy, frame) {
    const foot = data.foot, end = point(frame.end);
    let boxes = "";
    for (let i = 0; i < frame.boxes.length; i += 4) boxes += box(...frame.boxes.slice(i, i + 4));
    return `${strategy.words}${boxes}<path d="M${end} 0V${foot}" stroke="currentColor"></path>` +
      `<text x="${end}" y="${foot + 12}" text-anchor="end">${frame.said[2]}</text>`;
  }

  live(() => {
    const chosen = part("strategy") ? value("strategy") : 0, strategy = data.strategies[chosen];
    if (chosen !== offered) {
      offer("ahead", data.strategies[offered].ahead, strategy.ahead);
      offered = chosen;
    }
    const frame = strategy.runs[value("tokens")][value("bandwidth")][value("ahead")];
    const said = [strategy.name, ...frame.said];
    part("result").innerHTML = strategy.says.replace(/\{(\d)\}/g, (_, i) => said[i]);
    part("lanes").innerHTML = picture(strategy, frame);
  });
}
