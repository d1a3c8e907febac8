// Light and dark, the contents on a phone, copy buttons, and where we are on the page.
"use strict";

const root = document.documentElement;

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
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
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
});
