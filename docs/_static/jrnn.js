// A copy button on every block of code, which leaves prompts and printed results out; rows as cards; a filter for the operators.
"use strict";

function codeOf(block) {
  const lines = block.textContent.replace(/\n$/, "").split("\n");
  if (!lines.some((line) => line.startsWith(">>> "))) return lines.join("\n");
  return lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line)).map((line) => line.slice(4)).join("\n");
}

function addCopyButtons() {
  for (const block of document.querySelectorAll("div.highlight")) {
    const code = block.querySelector("pre");
    if (!code) continue;
    const text = codeOf(code);
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", "Copy the code");
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    block.append(button);
  }
}

function addCards() {
  const first = document.querySelector(".bd-article h1");
  if (!first || !/^(Operators|Examples)/.test(first.textContent)) return;
  for (const table of document.querySelectorAll(".bd-article table")) {
    const heads = [...table.querySelectorAll("thead th")].map((th) => th.textContent);
    for (const row of table.tBodies[0].rows) {
      [...row.cells].forEach((cell, k) => {
        cell.dataset.label = heads[k];
        cell.hidden = !cell.textContent.trim();
      });
    }
  }
  if (first.textContent.startsWith("Operators")) addFilter(first, [...document.querySelectorAll(".bd-article table tbody tr")]);
}

function addFilter(first, rows) {
  const box = document.createElement("p");
  box.className = "filter";
  box.innerHTML = '<label>Find an operator <input type="search" placeholder="such as LSTM or gradient none"></label> <output></output>';
  first.after(box);
  const input = box.querySelector("input");
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = [...row.cells].map((cell) => `${cell.dataset.label} ${cell.textContent}`).join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      count += !row.hidden;
    }
    for (const section of document.querySelectorAll(".bd-article section section")) {
      section.hidden = !section.querySelector("tbody tr:not([hidden])") && words.length > 0;
    }
    box.querySelector("output").textContent = `${count} of ${rows.length}`;
  };
  input.addEventListener("input", show);
  show();
}

// What is wider than the page scrolls by keys. The rest is left out of the order of Tab.
function stopAtWide() {
  for (const wide of document.querySelectorAll(".bd-article pre, .bd-article table, .bd-article p:has(> img)")) {
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
    else wide.removeAttribute("tabindex");
  }
}

function nameControls() {
  for (const toggle of document.querySelectorAll(".bd-sidebar-primary summary")) {
    const link = toggle.closest("li")?.querySelector("a");
    toggle.setAttribute("aria-label", `Pages below ${link ? link.textContent.trim() : "this one"}`);
  }
  for (const button of document.querySelectorAll(".search-button-field")) button.removeAttribute("aria-label"); // it has a text
}

document.addEventListener("DOMContentLoaded", () => {
  addCopyButtons();
  addCards();
  nameControls();
  stopAtWide();
});
window.addEventListener("load", stopAtWide); // with the fonts of the page
window.addEventListener("resize", stopAtWide);
