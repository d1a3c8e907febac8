(root) => {
  // What every interactive figure needs; interactive.py hands it to the figure's own script.
  const part = (name) => document.getElementById(`${root.id}-${name}`);
  const value = (name) => Number(part(name).value);
  const number = (n) => n.toLocaleString("en-US");
  const sum = (all) => all.reduce((a, b) => a + b, 0);
  // Names that a caller gave are text, wherever they are written.
  const escape = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const box = (x, y, width, height) => `x="${x}" y="${y}" width="${width}" height="${height}"`;
  const label = (x, y, words, more = "") => `<text x="${x}" y="${y}"${more}>${words}</text>`;
  const centred = (x, y, words) => label(x, y, words, ' text-anchor="middle"');

  // Offers other options, and keeps the chosen one where it is among them.
  function offer(name, before, options) {
    const chosen = options.indexOf(before[value(name)]);
    part(name).replaceChildren(...options.map((text, i) => new Option(text, i)));
    part(name).value = Math.max(0, chosen);
  }

  function live(update) {
    root.addEventListener("input", update);
    root.addEventListener("change", update);
    root.querySelector("fieldset").disabled = false;
    update();
  }

  // A run of events: `last(choice)` is the number of its last, `draw` shows one. Playing goes on
  // until the end, or until the reader takes over.
  function steps(choose, last, draw) {
    const play = part("play");
    let timer = 0;
    const stop = () => { clearInterval(timer); timer = 0; play.textContent = "Play"; };
    const update = () => {
      part("step").max = last(choose()); // moves it, if it must
      const step = value("step");
      draw({ ...choose(), step });
      // Not disabled: that would take the focus away from whoever steps by keyboard.
      part("back").setAttribute("aria-disabled", step === 0);
      part("next").setAttribute("aria-disabled", step === Number(part("step").max));
    };
    const ends = () => part("next").getAttribute("aria-disabled") === "true";
    const move = (by) => { part("step").value = value("step") + by; update(); }; // within the range
    const tick = () => { if (root.isConnected) move(1); if (ends() || !root.isConnected) stop(); };
    part("back").addEventListener("click", () => { stop(); move(-1); });
    part("next").addEventListener("click", () => { stop(); move(1); });
    play.addEventListener("click", () => {
      if (timer) return stop();
      if (ends()) move(-value("step")); // from the start again
      play.textContent = "Pause";
      timer = setInterval(tick, 900);
    });
    // Who asked for less motion steps by hand.
    play.hidden = matchMedia("(prefers-reduced-motion: reduce)").matches;
    live(() => { stop(); update(); });
  }

  return { part, value, number, sum, escape, box, label, centred, offer, live, steps };
}
