(root, data) => {
  // Which explanation an answer gets: 0 is the right one's, 1 and up those of known mistakes, and
  // -1 is another mistake. The page around it, which may keep answers, hears of each, and can give
  // them back: the two events below are all that they share.
  const BYTES = { b: 1, byte: 1, bytes: 1 }, TIMES = { s: 1, sec: 1, second: 1, seconds: 1 };
  ["k", "m", "g", "t", "p"].forEach((letter, i) => {
    BYTES[`${letter}b`] = 1000 ** (i + 1);
    BYTES[`${letter}ib`] = 1024 ** (i + 1);
  });
  Object.assign(TIMES, { ms: 1e-3, us: 1e-6, "µs": 1e-6, "μs": 1e-6, ns: 1e-9, min: 60, h: 3600 });
  const SHARES = { "": 1, "%": 0.01, percent: 0.01 };

  // How many of the question's unit one of the typed unit is; undefined where they do not compare.
  function scale(typed, unit) {
    const singular = (word) => word.replace(/(..)s$/, "$1"), words = unit.toLowerCase().split(" ");
    if (!typed || words.map(singular).includes(singular(typed))) return 1;
    for (const family of [BYTES, TIMES, SHARES]) {
      const own = words.find((word) => Object.hasOwn(family, word));
      if (own !== undefined && Object.hasOwn(family, typed)) return family[typed] / family[own];
    }
    return undefined;
  }

  // The number that a factor stands for: thousands apart, a decimal comma, a power; or NaN.
  function factor(text) {
    const [base, exponent = "1", more] = text.split("^");
    const plain = (t) => {
      const joined = /^-?[1-9]\d{0,2}(,\d{3})+(\.\d+)?$/.test(t) ? t.replaceAll(",", "") : t.replace(",", ".");
      return /^-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/.test(joined) ? Number(joined) : NaN;
    };
    return more === undefined ? plain(base) ** plain(exponent) : NaN;
  }

  // [number, unit] of what was typed, as in "64 KiB", "1 024", "7/8", "8 × 2^20 bytes" or "12.5 %".
  function read(text) {
    const plain = text.toLowerCase().replaceAll("−", "-").replace(/[\s_']+/g, " ").trim();
    const [, sum, unit = ""] = plain.match(/^(.*?\d\.?) ?([a-zµμ%][^\d]*)?$/) ?? [null, "", ""];
    const times = sum.replaceAll(" ", "").replace(/(?<=\d)x(?=\d)/g, "*").replaceAll("**", "^");
    const parts = times.split(/([*×·/])/);
    let value = factor(parts[0]);
    for (let i = 1; i < parts.length; i += 2) {
      value = parts[i] === "/" ? value / factor(parts[i + 1]) : value * factor(parts[i + 1]);
    }
    return [value, unit.split(" ")[0]];
  }

  // [place among the explanations, words in front of them] for a number that was typed.
  function judgeNumber({ numbers, unit, tolerance }, text) {
    if (!text.trim()) return [undefined, "Type a number first."];
    const [value, typed] = read(text), scaled = scale(typed, unit);
    if (!Number.isFinite(value)) return [undefined, "That is no number: type one as in 1024, 1,024 or 3/8."];
    if (scaled === undefined) {
      return [undefined, `The unit ${typed} does not fit here: ${unit ? `the answer is in ${unit}` : "the answer has none"}.`];
    }
    // Who names another unit than the question's may round to three digits.
    const allowed = Math.max(tolerance, scaled === 1 ? 1e-9 : 5e-3), given = value * scaled;
    const away = numbers.map((n) => Math.abs(given - n) / (Math.abs(n) || 1));
    const nearest = away.indexOf(Math.min(...away));
    if (away[nearest] <= allowed) return [nearest, nearest ? "No." : "Right."];
    const side = given > numbers[0] ? "smaller" : "larger";
    return [-1, `No, the answer is ${side}. Think of what is counted, on which device, in which unit; then try again.`];
  }

  const judgeChoice = (value) =>
    value === undefined ? [undefined, "Choose an option first."] : [Number(value), value === "0" ? "Right." : "No."];

  root.querySelectorAll("[data-question]").forEach((question, i) => {
    const known = data.questions[i], verdict = question.querySelector(".verdict");
    const inputs = [...question.querySelectorAll("input")], [first] = inputs;
    const typing = first.type === "text";
    const given = () => (typing ? first.value : inputs.find((input) => input.checked)?.value);

    function show() {
      const [place, words] = typing ? judgeNumber(known, given()) : judgeChoice(given());
      const told = question.querySelector(`[data-told="${place}"]`);
      verdict.replaceChildren(words, ...(told ? [" ", ...told.cloneNode(true).childNodes] : []));
      verdict.classList.toggle("right", place === 0);
      if (typing) first.setAttribute("aria-invalid", place !== 0);
      return place;
    }

    function check() {
      const place = show();
      if (place === undefined) return;
      const detail = { key: question.dataset.question, given: given(), right: place === 0 };
      root.dispatchEvent(new CustomEvent("shardwise-answered", { bubbles: true, detail }));
    }

    root.addEventListener("shardwise-restore", ({ detail }) => {
      const kept = detail[question.dataset.question] ?? "";
      if (typing) first.value = kept;
      for (const input of typing ? [] : inputs) input.checked = input.value === kept;
      if (kept) return show();
      verdict.replaceChildren();
      verdict.classList.remove("right");
      first.removeAttribute("aria-invalid");
    });
    question.querySelector("button").addEventListener("click", check);
    question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && inputs.includes(event.target)) { event.preventDefault(); check(); }
    });
    question.querySelector("fieldset").disabled = false;
  });
}
