(root, data, { part, value, escape, live }) => {
  // Python computed every number; this chooses, and draws bars to one scale.
  const [, ...axes] = data.names;
  live(() => {
    const at = data.sizes.reduce((sum, size, i) => sum * size + value(`choice${i}`), 0);
    const frame = data.frames[at], none = typeof frame === "string";
    const [held, compute, ...rest] = none ? [0, 0, ...axes.flatMap(() => [0, 0])] : frame;
    const sent = rest.filter((_, i) => i % 2 === 0), seconds = rest.filter((_, i) => i % 2);
    const all = [compute, ...seconds], longest = Math.max(...all) || 1;
    all.forEach((s, i) => {
      part(`bar${i}`).setAttribute("width", Math.round(10 * data.wide * s / longest) / 10);
      part(`said${i}`).textContent = none ? "" : `${s} s`;
    });
    if (none) { part("result").innerHTML = `<span class="error">${escape(frame)}</span>`; return; }
    const slowest = seconds.indexOf(Math.max(...seconds));
    const told = axes.map((name, i) => `${escape(name)} ${sent[i]} GB`).join(", ");
    part("result").innerHTML =
      `A device holds <b data-name="held">${held}</b> GB, which `
      + `${held <= data.room ? "fits" : "does not fit"} into ${data.room} GB. `
      + `In a step it sends: ${told}. The axis that takes longest is `
      + `<b data-name="slowest">${escape(axes[slowest])}</b>, with ${seconds[slowest]} s, `
      + `${seconds[slowest] > compute ? "more" : "less"} than the ${compute} s of compute.`;
  });
}
