async (root, packed) => {
  // Shows the state that the controls choose. Python drew all of them: interactive.py packs them.
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const { controls, parts, order, templates } = await new Response(stream).json();
  const numbers = templates.map(([, ...columns]) => columns.map((column) => column.split(" "))), rows = {};
  const texts = order.map((at) => { // a template's next row of numbers, each behind its piece
    const row = rows[at] = (rows[at] ?? -1) + 1;
    return templates[at][0].map((piece, k) => piece + (numbers[at][k]?.[row] ?? "")).join("");
  });
  const part = (name) => document.getElementById(`${root.id}-${name}`);
  const value = (name) => Number(part(name).value);
  const chosen = ({ keys, table }) => keys.reduce((found, key) => found[value(key)], table);
  const offered = {}, shown = {};
  let seen = 0; // a table has the number of a text, counted from 1; 0 stands for the next new one
  const read = (entry) => Array.isArray(entry) ? entry.map(read) : texts[(entry || ++seen) - 1];
  for (const name in parts) parts[name].table = read(parts[name].table);

  // Other options where those before have changed; the chosen one is kept if it is among them.
  function offer(name, labels) {
    const control = part(name), before = offered[name];
    if (labels === before) return;
    offered[name] = labels;
    if (control.type !== "select-one") { control.max = labels.length - 1; return; } // moves it, if it must
    const kept = before ? labels.indexOf(before[control.value]) : control.value;
    control.replaceChildren(...labels.map((label, i) => new Option(label, i)));
    control.value = Math.max(0, kept);
  }

  function update() {
    for (const name in controls) offer(name, chosen(controls[name]));
    for (const name in parts) {
      const text = chosen(parts[name]);
      if (shown[name] === text) continue;
      shown[name] = text;
      part(name).innerHTML = text.replaceAll("<style>#@", `<style>#${root.id}-`);
    }
    // Not disabled: that would take the focus away from whoever steps by keyboard.
    part("back")?.setAttribute("aria-disabled", value("step") === 0);
    part("next")?.setAttribute("aria-disabled", ends());
  }

  // Of a run of events: playing goes on until the end, or until the reader takes over.
  const ends = () => part("step").value === part("step").max;
  const play = part("play");
  let timer = 0;
  const stop = () => { clearInterval(timer); timer = 0; if (play) play.textContent = "Play"; };
  const move = (by) => { part("step").value = value("step") + by; update(); }; // within the range
  const tick = () => { if (root.isConnected) move(1); if (ends() || !root.isConnected) stop(); };
  part("back")?.addEventListener("click", () => { stop(); move(-1); });
  part("next")?.addEventListener("click", () => { stop(); move(1); });
  play?.addEventListener("click", () => {
    if (timer) return stop();
    if (ends()) move(-value("step")); // from the start again
    play.textContent = "Pause";
    timer = setInterval(tick, 900);
  });
  // Who asked for less motion steps by hand.
  if (play) play.hidden = matchMedia("(prefers-reduced-motion: reduce)").matches;

  // What has data-chooses="name=number …" is chosen as it is pointed at, or touched.
  root.addEventListener("pointerover", ({ target }) => {
    const pairs = target.closest("[data-chooses]")?.dataset.chooses.split(" ").map((one) => one.split("="));
    if (!pairs || pairs.every(([name, number]) => part(name).value === number)) return;
    for (const [name, number] of pairs) {
      part(name).max = number; // until update: a slider's may be too low
      part(name).value = number;
      offered[name] = undefined;
    }
    update();
  });
  for (const event of ["input", "change"]) root.addEventListener(event, () => { stop(); update(); });
  root.querySelector("fieldset").disabled = false;
  update();
}
