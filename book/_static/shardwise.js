// Light and dark, the contents on a phone, copy buttons, where we are on the page, what can be
// scrolled, which questions were answered, and the field over the gallery of failures.
"use strict";

const root = document.documentElement;
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);

addEventListener("DOMContentLoaded", () => {
  for (const button of document.querySelectorAll("button.mode")) {
    button.addEventListener("click", () => {
      const theme = root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
      const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
      try { // files may have no storage; who is back at the system's choice follows it again
        if (theme === system) localStorage.removeItem("theme"); else localStorage.theme = theme;
      } catch { /* then the choice lasts for this page */ }
    });
  }

  const menu = document.querySelector("a.menu");
  const contents = document.getElementById("contents");
  const toggle = (open) => {
    contents.classList.toggle("open", open);
    menu.setAttribute("aria-expanded", contents.classList.contains("open"));
  };
  menu.setAttribute("role", "button");
  toggle(false);
  menu.addEventListener("click", (event) => { event.preventDefault(); toggle(); });
  menu.addEventListener("keydown", (event) => {
    if (event.key === " ") { event.preventDefault(); toggle(); } // as a button, not as a link
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && contents.classList.contains("open")) { toggle(false); menu.focus(); }
  });
  document.querySelector("main").addEventListener("click", () => toggle(false));

  for (const code of document.querySelectorAll("div.cell_input pre, article > section div.highlight pre")) {
    if (code.closest(".cell_output") || code.parentElement.querySelector("button.copy")) continue;
    const button = make("button", { className: "copy", type: "button", textContent: "Copy" });
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    code.parentElement.append(button);
  }

  const links = new Map();
  for (const link of document.querySelectorAll("nav.here a[href^='#']")) {
    const target = document.getElementById(decodeURIComponent(link.hash.slice(1)));
    if (target) links.set(target.querySelector("h2, h3") ?? target, link);
  }
  const spy = new IntersectionObserver((entries) => {
    const seen = entries.filter((entry) => entry.isIntersecting).at(-1);
    if (!seen) return;
    for (const link of links.values()) link.removeAttribute("aria-current");
    links.get(seen.target).setAttribute("aria-current", "true");
  }, { rootMargin: "0px 0px -70% 0px" });
  for (const heading of links.keys()) spy.observe(heading);

  reachScrolling();
  keepAnswers();
  for (const gallery of document.querySelectorAll("div.failures")) filterFailures(gallery);
});

// What overflows at this width can be scrolled by keyboard; what fits is no stop on the way.
function reachScrolling() {
  const scrolls = (e) => /auto|scroll/.test(getComputedStyle(e).overflow) && // on a phone, figures too
    (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1);
  const changed = new ResizeObserver((seen) => {
    for (const { target } of seen) {
      if (scrolls(target)) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });
  for (const element of document.querySelectorAll("article :is(pre, table, div.math, figure, .output, .pictures)"))
    changed.observe(element);
}

// A field over the gallery of failures. A pasted message has numbers and names of its own: where no
// entry has all of its words, those stay that have the most.
function filterFailures(gallery) {
  const entries = [...gallery.querySelectorAll("div.failure")];
  if (!entries.length) return;
  const words = (text) => new Set(text.toLowerCase().match(/[\p{L}\p{N}_]+/gu));
  const texts = entries.map((entry) => entry.textContent.toLowerCase()), whole = texts.map(words);
  const holds = (i, word) => (word.length < 3 ? whole[i].has(word) : texts[i].includes(word));
  const innerHTML = '<label>Symptom or error message <input type="search" autocomplete="off" spellcheck="false">' +
    '</label><span role="status"></span>';
  const field = make("p", { className: "filter", innerHTML });
  const [input, status] = [field.querySelector("input"), field.querySelector("span")];
  const update = () => {
    const asked = [...words(input.value)];
    const has = texts.map((_, i) => asked.filter((word) => holds(i, word)).length);
    const most = Math.max(...has), enough = most === asked.length || (most > 1 && most * 2 > asked.length);
    entries.forEach((entry, i) => { entry.hidden = !enough || has[i] < most; });
    const shown = entries.filter((entry) => !entry.hidden).length;
    status.textContent = !asked.length ? `${entries.length} failures` : !shown ? "No failure has these words." :
      `${shown} of ${entries.length} failures ${most < asked.length ? "have most of these words" : "have these words"}`;
  };
  input.addEventListener("input", update);
  gallery.before(field);
  update();
}

// Answers, as questions.js tells of them: {total, given: {question: [answer, right]}} by page, on
// this device alone. Storage may be refused, full or damaged: then an answer lasts for this page.
function keepAnswers() {
  const name = (path) => `questions ${path.replace(/(index)?\.html$/, "")}`, here = name(location.pathname);
  const asked = [...document.querySelectorAll("[data-question]")].map((one) => one.dataset.question);
  const read = (key) => {
    try {
      const { total, given } = JSON.parse(localStorage.getItem(key));
      return { total, given: Object.fromEntries(Object.entries(given).filter(([, one]) => Array.isArray(one))) };
    } catch { return { total: 0, given: {} }; }
  };
  const kept = new Map(), notes = [];
  const known = (key) => kept.get(key) ?? kept.set(key, read(key)).get(key);
  const right = ({ given }) => Object.values(given).filter((one) => one[1] === true).length;

  function show() {
    for (const link of document.querySelectorAll("#contents li a[href]")) {
      const page = known(name(new URL(link.href).pathname));
      link.querySelector(".answered")?.remove();
      if (!Object.keys(page.given).length) continue;
      const innerHTML = `${right(page)} of ${Number(page.total)}<span class="unseen"> questions right</span>`;
      link.append(" ", make("small", { className: "answered", innerHTML }));
    }
    for (const note of notes) {
      note.hidden = !Object.keys(known(here).given).length;
      note.firstChild.textContent = `${right(known(here))} of ${asked.length} right. Your answers stay in this browser. `;
    }
  }

  function keep(change) {
    const page = known(here);
    const given = Object.entries(page.given).filter(([key]) => asked.includes(key));
    kept.set(here, { total: asked.length, given: change(Object.fromEntries(given)) });
    try {
      if (Object.keys(known(here).given).length) localStorage.setItem(here, JSON.stringify(known(here)));
      else localStorage.removeItem(here);
    } catch { /* refused */ }
    show();
  }

  function restore(figure) {
    const given = Object.entries(known(here).given).map(([key, [answer]]) => [key, answer]);
    figure.dispatchEvent(new CustomEvent("shardwise-restore", { detail: Object.fromEntries(given) }));
  }

  for (const figure of new Set(Array.from(document.querySelectorAll("[data-question]"), (one) => one.parentElement))) {
    const note = make("p", { className: "kept" });
    const forget = make("button", { type: "button", textContent: "Forget them" });
    forget.addEventListener("click", () => {
      figure.querySelector("input").focus(); // the button goes
      keep(() => ({}));
      for (const one of notes) restore(one.parentElement);
    });
    note.append("", forget);
    figure.append(note);
    notes.push(note);
    restore(figure);
    figure.addEventListener("shardwise-answered", ({ detail: { key, given, right } }) => {
      keep((others) => ({ ...others, [key]: [given, right] }));
    });
  }
  addEventListener("storage", ({ key }) => { // another tab's, or the last page's, if it was late
    if (key === null) kept.clear(); else kept.delete(key);
    if (key === here || key === null) for (const one of notes) restore(one.parentElement);
    show();
  });
  show();
}
