"use strict";
// Elements of the same statement or access share ids in data-groups and are highlighted together.
(() => {
  const status = document.querySelector(".status");
  const announce = (text) => { status.textContent = text; };
  const getGroups = (element) => element.dataset.groups.split(/\s+/).filter(Boolean);
  const linked = [...document.querySelectorAll("[data-groups]")];
  const members = new Map();
  for (const element of linked)
    for (const group of getGroups(element)) {
      if (!members.has(group)) members.set(group, []);
      members.get(group).push(element);
    }

  // Each box of linked elements is one stop of the Tab key; arrow keys move within it.
  const COLUMN = ".column, .columns .lines";
  const findBox = (element) => element.closest(`${COLUMN}, svg, table, figure, section`) || document.body;
  const boxes = new Map();
  for (const element of linked) {
    const box = findBox(element);
    if (!boxes.has(box)) boxes.set(box, []);
    boxes.get(box).push(element);
    element.tabIndex = boxes.get(box).length === 1 ? 0 : -1;
    if (!element.matches("button")) element.setAttribute("role", "button");
    element.setAttribute("aria-pressed", "false");
  }
  const focusStop = (element) => {
    for (const other of boxes.get(findBox(element))) other.tabIndex = -1;
    element.tabIndex = 0;
  };

  let selected = null;
  const clear = () => {
    for (const element of document.querySelectorAll(".lit")) {
      element.classList.remove("lit");
      element.setAttribute("aria-pressed", "false");
    }
    selected = null;
  };

  // The address keeps what is highlighted and searched for, so that a link to the page shows the same.
  const readState = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const keepInLink = (name, value) => {
    const state = readState();
    if (value) state.set(name, value); else state.delete(name);
    history.replaceState(null, "", `#${state}`);
  };
  const describeBox = (box) => {
    const label = box.getAttribute("aria-label");
    const heading = box.closest("section")?.querySelector("h2, h3, h4");
    return label || heading?.textContent || "the page";
  };
  const scrollIntoView = (box, element) => {
    if (!box.matches(COLUMN)) return;
    const gap = element.getBoundingClientRect().top - box.getBoundingClientRect().top;
    box.scrollTop += gap - box.clientHeight / 3;
  };
  const highlight = (element) => {
    const isSelected = element === selected;
    clear();
    keepInLink("lit", isSelected ? "" : element.dataset.groups);
    if (isSelected) { announce("Nothing is highlighted."); return; }
    selected = element;
    const counts = new Map();
    for (const group of getGroups(element))
      for (const other of members.get(group)) {
        if (other.classList.contains("lit")) continue;
        other.classList.add("lit");
        other.setAttribute("aria-pressed", "true");
        const box = findBox(other);
        if (!counts.has(box) && box !== findBox(element)) scrollIntoView(box, other);
        counts.set(box, (counts.get(box) || 0) + 1);
      }
    const parts = [...counts].map(([box, count]) => `${count} in ${describeBox(box)}`);
    announce(`Highlighted: ${parts.join(", ")}. Escape clears the selection.`);
  };

  document.addEventListener("click", (event) => {
    const element = event.target.closest("[data-groups]");
    if (element) { focusStop(element); highlight(element); }
  });
  const MOVES = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { clear(); clearValues(); keepInLink("lit", ""); announce(""); return; }
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const value = event.target.closest?.(".value");
    const element = event.target.closest?.("[data-groups]");
    if (!element && !value) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (element) highlight(element); else press(value);
    } else if (element && event.key in MOVES) {
      event.preventDefault();
      const box = boxes.get(findBox(element));
      const next = box[Math.min(Math.max(box.indexOf(element) + MOVES[event.key], 0), box.length - 1)];
      focusStop(next);
      next.focus();
    }
  });

  // Parallel coordinates: only trials with one of the selected values on each axis stay visible.
  const values = [...document.querySelectorAll(".value")];
  for (const value of values) {
    value.setAttribute("tabindex", "0");
    value.setAttribute("role", "button");
    value.setAttribute("aria-pressed", "false");
  }
  const filter = (plot) => {
    const selectedValues = new Map();
    for (const value of plot.querySelectorAll('.value[aria-pressed="true"]')) {
      const axis = Number(value.dataset.axis);
      if (!selectedValues.has(axis)) selectedValues.set(axis, new Set());
      selectedValues.get(axis).add(value.dataset.value);
    }
    let numShown = 0, best = "";
    const trials = plot.querySelectorAll(".trial");
    for (const trial of trials) {
      const trialValues = trial.dataset.values.split(" ");
      const isShown = [...selectedValues].every(([axis, allowed]) => allowed.has(trialValues[axis]));
      trial.classList.toggle("off", !isShown);
      if (!isShown) continue;
      numShown += 1;
      best = trial.querySelector("title").textContent; // the fastest trial is drawn last
    }
    const fastest = best ? `; the fastest: ${best}` : "";
    announce(selectedValues.size ? `${numShown} of ${trials.length} trials shown${fastest}` : "");
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

  // Search over the layers of a network: rows of other layers are hidden. A row of class "more" belongs to the one above.
  const tables = [...document.querySelectorAll("table.layers")];
  const search = (text) => {
    const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
    let isFound = false, numFound = 0;
    for (const row of rows) {
      if (!row.classList.contains("more")) {
        isFound = row.cells[0].textContent.toLowerCase().includes(text.toLowerCase());
        numFound += isFound;
      }
      row.hidden = !isFound;
    }
    for (const table of tables) if (text && table.closest("details")) table.closest("details").open = true;
    announce(text ? `${numFound} layers shown` : "");
    keepInLink("layers", text);
  };
  const state = readState();

  // Two kernels side by side: the same level of both, and a slider that divides the width. The state in the address is
  // "left,right,level,percent".
  const kernels = [...document.querySelectorAll(".kernels > .kernel")];
  const DEFAULT_PERCENT = 50;
  const makeLabel = (text, control) => {
    const label = document.createElement("label");
    label.append(text, control);
    return label;
  };
  const makeSelect = (values, value) => {
    const select = document.createElement("select");
    for (const each of values) select.append(new Option(each, each));
    select.value = value;
    return select;
  };
  if (kernels.length > 1) {
    const box = kernels[0].parentElement;
    const names = kernels.map((kernel) => kernel.dataset.name);
    const levels = [...new Set([...box.querySelectorAll("[data-level]")].map((each) => each.dataset.level))];
    const [keptLeft, keptRight, keptLevel, keptPercent] = (state.get("compare") || "").split(",");
    const choose = (values, value, other) => values.includes(value) ? value : other;
    const enabled = document.createElement("input");
    enabled.type = "checkbox";
    enabled.checked = Boolean(keptLeft);
    const left = makeSelect(names, choose(names, keptLeft, names[0]));
    const right = makeSelect(names, choose(names, keptRight, names[1]));
    const level = makeSelect(levels, choose(levels, keptLevel, levels.includes("CUDA") ? "CUDA" : levels[0]));
    const slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 5, max: 95, step: 5 });
    slider.value = keptPercent || DEFAULT_PERCENT;
    const show = () => {
      if (left.value === right.value) right.value = names.find((name) => name !== left.value) || left.value;
      for (const control of [left, right, level, slider]) control.disabled = !enabled.checked;
      slider.setAttribute("aria-label", `Width of ${left.value}, in percent`);
      slider.setAttribute("aria-valuetext", `${left.value} ${slider.value} %, ${right.value} ${100 - slider.value} %`);
      box.classList.toggle("beside", enabled.checked);
      box.style.setProperty("--left", `${slider.value}%`);
      for (const kernel of kernels) {
        const side = kernel.dataset.name === left.value ? "left" : kernel.dataset.name === right.value ? "right" : "";
        if (enabled.checked && side) { kernel.dataset.side = side; kernel.querySelector("details").open = true; }
        else delete kernel.dataset.side;
        for (const each of kernel.querySelectorAll("[data-level]"))
          each.classList.toggle("level-shown", each.dataset.level === level.value);
      }
    };
    const change = () => {
      show();
      keepInLink("compare", enabled.checked ? [left, right, level, slider].map((each) => each.value).join() : "");
    };
    const controls = document.createElement("fieldset");
    const legend = document.createElement("legend");
    legend.textContent = "Side by side";
    controls.className = "compare";
    controls.append(legend, makeLabel(enabled, "Compare two schedules"), makeLabel("left", left),
      makeLabel("right", right), makeLabel("level", level), slider);
    for (const control of [enabled, left, right, level, slider]) control.addEventListener("input", change);
    box.before(controls);
    show();
    if (keptLeft) controls.scrollIntoView({ behavior: "instant" });
  }
  if (tables.length) {
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "Search layers, such as 3x3";
    input.setAttribute("aria-label", "Search layers");
    input.addEventListener("input", () => search(input.value));
    tables[0].closest("section").querySelector("h2").after(input);
    if (state.get("layers")) { input.value = state.get("layers"); search(input.value); }
  }
  const kept = linked.find((element) => element.dataset.groups === state.get("lit"));
  if (kept) { highlight(kept); kept.scrollIntoView({ block: "center" }); }
})();
