"use strict";
// What stands for the same statement or access is lit together: elements share ids in data-groups.
(() => {
  const status = document.querySelector(".status");
  const tell = (text) => { status.textContent = text; };
  const groupsOf = (each) => each.dataset.groups.split(/\s+/).filter(Boolean);
  const linked = [...document.querySelectorAll("[data-groups]")];
  const members = new Map();
  for (const each of linked)
    for (const group of groupsOf(each)) {
      if (!members.has(group)) members.set(group, []);
      members.get(group).push(each);
    }

  // One stop of the Tab key for each box of linked elements; arrow keys move within it.
  const COLUMN = ".column, .columns ol";
  const boxOf = (each) => each.closest(`${COLUMN}, svg, table, figure, section`) || document.body;
  const boxes = new Map();
  for (const each of linked) {
    const box = boxOf(each);
    if (!boxes.has(box)) boxes.set(box, []);
    boxes.get(box).push(each);
    each.tabIndex = boxes.get(box).length === 1 ? 0 : -1;
    if (!each.matches("button")) each.setAttribute("role", "button");
    each.setAttribute("aria-pressed", "false");
  }
  const visit = (each) => {
    for (const other of boxes.get(boxOf(each))) other.tabIndex = -1;
    each.tabIndex = 0;
  };

  let chosen = null;
  const clear = () => {
    for (const each of document.querySelectorAll(".lit")) {
      each.classList.remove("lit");
      each.setAttribute("aria-pressed", "false");
    }
    chosen = null;
  };
  const nameOf = (box) => {
    const label = box.getAttribute("aria-label");
    const heading = box.closest("section")?.querySelector("h2, h5");
    return label || heading?.textContent || "the page";
  };
  const show = (box, each) => {
    if (!box.matches(COLUMN)) return;
    const gap = each.getBoundingClientRect().top - box.getBoundingClientRect().top;
    box.scrollTop += gap - box.clientHeight / 3;
  };
  const light = (each) => {
    const again = each === chosen;
    clear();
    if (again) { tell("Nothing is lit."); return; }
    chosen = each;
    const counts = new Map();
    for (const group of groupsOf(each))
      for (const other of members.get(group)) {
        if (other.classList.contains("lit")) continue;
        other.classList.add("lit");
        other.setAttribute("aria-pressed", "true");
        const box = boxOf(other);
        if (!counts.has(box) && box !== boxOf(each)) show(box, other);
        counts.set(box, (counts.get(box) || 0) + 1);
      }
    tell("Lit: " + [...counts].map(([box, count]) => `${count} in ${nameOf(box)}`).join(", ") + ". Escape clears.");
  };

  document.addEventListener("click", (event) => {
    const each = event.target.closest("[data-groups]");
    if (each) { visit(each); light(each); }
  });
  const MOVES = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { clear(); clearValues(); tell(""); return; }
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const value = event.target.closest?.(".value");
    const each = event.target.closest?.("[data-groups]");
    if (!each && !value) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (each) light(each); else press(value);
    } else if (each && event.key in MOVES) {
      event.preventDefault();
      const box = boxes.get(boxOf(each));
      const next = box[Math.min(Math.max(box.indexOf(each) + MOVES[event.key], 0), box.length - 1)];
      visit(next);
      next.focus();
    }
  });

  // Parallel coordinates: chosen values of axes leave the trials that have one of them on each such axis.
  const values = [...document.querySelectorAll(".value")];
  for (const value of values) {
    value.setAttribute("tabindex", "0");
    value.setAttribute("role", "button");
    value.setAttribute("aria-pressed", "false");
  }
  const filter = (plot) => {
    const wanted = new Map();
    for (const value of plot.querySelectorAll('.value[aria-pressed="true"]')) {
      const axis = Number(value.dataset.axis);
      if (!wanted.has(axis)) wanted.set(axis, new Set());
      wanted.get(axis).add(value.dataset.value);
    }
    let left = 0, best = "";
    const trials = plot.querySelectorAll(".trial");
    for (const trial of trials) {
      const has = trial.dataset.values.split(" ");
      const stays = [...wanted].every(([axis, some]) => some.has(has[axis]));
      trial.classList.toggle("off", !stays);
      if (stays) { left += 1; best = trial.querySelector("title").textContent; } // the fastest is drawn last
    }
    tell(wanted.size ? `${left} of ${trials.length} trials left` + (best ? `; the fastest: ${best}` : "") : "");
  };
  function press(value) {
    value.setAttribute("aria-pressed", String(value.getAttribute("aria-pressed") !== "true"));
    filter(value.closest("svg"));
  }
  function clearValues() {
    for (const value of values) value.setAttribute("aria-pressed", "false");
    for (const trial of document.querySelectorAll(".trial.off")) trial.classList.remove("off");
  }
  document.addEventListener("click", (event) => {
    const value = event.target.closest(".value");
    if (value) press(value);
  });
})();
