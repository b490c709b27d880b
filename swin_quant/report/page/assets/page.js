"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const figure = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, useGrouping: false });
  const views = new Map();

  function draw(place, spec) {
    const options = { actions: false, renderer: "svg", theme: dark.matches ? "dark" : undefined, ast: false,
      config: { font: "system-ui, sans-serif", axis: { gridOpacity: 0.3 }, legend: { symbolFillColor: "#888", symbolStrokeColor: "#888" } } };
    return vegaEmbed(place, spec, options).then((result) => { views.set(place, result.view); return result.view; });
  }

  function drawAll() {
    for (const [place, spec] of Object.entries(facts.charts)) {
      const element = document.getElementById(place);
      draw(element, spec).then((view) => {
        if (!place.startsWith("network")) return;
        view.addEventListener("click", (event, item) => { if (item && item.datum && item.datum.node) choose(item.datum.node); });
      });
    }
    if (chosen) showValues(chosen);
  }

  const table = document.querySelector("#nodes table");
  const search = document.getElementById("search");
  const said = document.getElementById("found");
  let rows = [], chosen = null, order = { key: null, up: true };

  function build() {
    const head = table.tHead.rows[0];
    for (const column of facts.columns) {
      const cell = document.createElement("th"), button = document.createElement("button");
      cell.scope = "col";
      button.textContent = column.title;
      button.addEventListener("click", () => sort(column.key));
      cell.dataset.key = column.key;
      cell.append(button);
      head.append(cell);
    }
    rows = facts.nodes.map((node) => {
      const row = document.createElement("tr");
      row.className = node.on ? "" : "off";
      for (const column of facts.columns) {
        const cell = row.insertCell(), value = node[column.key];
        if (column.key === "name") {
          const button = document.createElement("button");
          button.className = "name";
          button.append(...breakable(value));
          button.addEventListener("click", () => choose(value));
          cell.className = "name";
          cell.append(button);
        } else {
          cell.textContent = value === null ? "–" : typeof value === "number" ? figure.format(value) : value;
          if (column.number) cell.className = "number";
        }
      }
      return { node, row, text: Object.values(node).filter((each) => typeof each === "string").join(" ").toLowerCase() };
    });
    show();
  }

  // A name of several lines is broken behind its points.
  function breakable(name) {
    return name.split(/(?<=\.)/).flatMap((part, place) => (place ? [document.createElement("wbr"), part] : [part]));
  }

  function sort(key) {
    order = { key, up: order.key === key ? !order.up : true };
    const sign = order.up ? 1 : -1;
    rows.sort((a, b) => {
      const [x, y] = [a.node[key], b.node[key]];
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (typeof x === "number" ? x - y : String(x).localeCompare(String(y)));
    });
    for (const cell of table.tHead.rows[0].cells) {
      cell.setAttribute("aria-sort", cell.dataset.key !== key ? "none" : order.up ? "ascending" : "descending");
    }
    show();
  }

  function show() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter((each) => words.every((word) => each.text.includes(word)));
    table.tBodies[0].replaceChildren(...kept.map((each) => each.row));
    said.textContent = `${kept.length} of ${rows.length} nodes`;
  }

  function choose(name) {
    chosen = name;
    for (const each of rows) each.row.classList.toggle("chosen", each.node.name === name);
    showValues(name);
  }

  function showValues(name) {
    const node = facts.nodes.find((each) => each.name === name);
    const about = document.getElementById("values-title"), place = document.getElementById("values");
    about.textContent = `${name}: ${node.on ? node.kind : "off"}, ${node.role}`;
    const bins = facts.bins[name];
    if (!bins) { place.textContent = "No histogram: the statistics that calibration wrote are not beside the checkpoint."; return; }
    const width = (bins.high - bins.low) / bins.counts.length;
    const data = bins.counts.map((count, i) => ({ low: bins.low + i * width, high: bins.low + (i + 1) * width, count }));
    const ends = node.low === null ? [] : [{ at: node.low, what: "lowest level" }, { at: node.high, what: "highest level" }];
    const levels = [];
    const steps = 2 ** node.bits - (node.grid === "symmetric" ? 2 : 1);
    if (node.low !== null && node.bits <= 6) {
      for (let i = 0; i <= steps; i++) levels.push({ at: node.low + (i * (node.high - node.low)) / steps });
    }
    if (node.low !== null && node.kind !== "fp8") about.textContent += `, a step is ${figure.format((node.high - node.low) / steps)}`;
    const datasets = { bins: data, ends, levels };
    const layer = facts.values.layer.filter((each) => datasets[each.data.name].length);
    draw(place, { ...facts.values, layer, datasets });
  }

  if (table) { build(); search.addEventListener("input", show); }
  drawAll();
  dark.addEventListener("change", drawAll);
})();
