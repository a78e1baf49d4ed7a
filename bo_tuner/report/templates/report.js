"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  const plots = [];

  // The page's colours as a change of a figure's layout.
  function colours(layout) {
    const style = getComputedStyle(document.documentElement);
    const [ink, muted, grid, line, card] = ["--ink", "--muted", "--grid", "--line", "--card"].map((name) => style.getPropertyValue(name).trim());
    const change = { "font.color": ink, "hoverlabel.bgcolor": card, "hoverlabel.bordercolor": line, "hoverlabel.font.color": ink };
    for (const axis of Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name))) {
      change[`${axis}.gridcolor`] = grid;
      change[`${axis}.linecolor`] = line;
      change[`${axis}.zerolinecolor`] = line;
      change[`${axis}.tickfont.color`] = muted;
      change[`${axis}.title.font.color`] = muted;
    }
    return change;
  }

  // What the page's width changes. On a phone the rows that name the layouts stand in for the legend.
  function widths({ node, hasLegend }) {
    return { width: node.clientWidth, showlegend: hasLegend && !(node.id === "throughput" && node.clientWidth < 480) };
  }

  // The legend stands above the panels and must not take their height.
  function makeRoom({ node, height }) {
    const legend = node.querySelector("g.legend");
    return Plotly.relayout(node, { height: height + (legend ? Math.ceil(legend.getBoundingClientRect().height) : 0) });
  }

  function set(target, path, value) {
    const [first, ...rest] = path.split(".");
    if (rest.length === 0) target[first] = value;
    else set(target[first] ??= {}, rest.join("."), value);
  }

  async function draw(holder) {
    const node = document.getElementById(holder.dataset.figure);
    const { data, layout } = JSON.parse(holder.textContent);
    // Where fingers scroll, a drag must not zoom.
    layout.dragmode = coarse.matches ? false : "zoom";
    const plot = { node, height: layout.height, hasLegend: layout.showlegend, width: node.clientWidth };
    for (const [path, value] of Object.entries({ ...colours(layout), ...widths(plot) })) set(layout, path, value);
    const config = {
      displaylogo: false,
      displayModeBar: coarse.matches ? false : "hover",
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      toImageButtonOptions: { filename: node.id, scale: 2 },
    };
    await Plotly.newPlot(node, data, layout, config);
    plots.push(plot);
    await makeRoom(plot);
    new ResizeObserver(() => {
      if (node.clientWidth === plot.width) return;
      plot.width = node.clientWidth;
      requestAnimationFrame(() => Plotly.relayout(node, widths(plot)).then(() => makeRoom(plot)));
    }).observe(node);
  }

  function recolour() {
    plots.forEach((plot) => Plotly.relayout(plot.node, colours(plot.node.layout)));
  }

  async function copy(button) {
    const source = document.getElementById(button.dataset.copies);
    try {
      await navigator.clipboard.writeText(source.textContent);
    } catch {
      // No right to the clipboard: the older way, which leaves the text selected.
      getSelection().selectAllChildren(source);
      if (!document.execCommand("copy")) return say(button, "Selected");
    }
    say(button, "Copied");
  }

  function say(button, text) {
    button.textContent = text;
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  }

  function sort(table, column, header) {
    const descending = header.getAttribute("aria-sort") === "ascending";
    table.querySelectorAll("thead th").forEach((other) => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.key ?? row.cells[column].textContent.trim();
    const isNumber = header.classList.contains("number");
    const compare = (a, b) => (isNumber ? Number(key(a)) - Number(key(b)) : key(a).localeCompare(key(b), "en", { numeric: true }));
    const rows = [...table.tBodies[0].rows].sort(compare);
    table.tBodies[0].append(...(descending ? rows.reverse() : rows));
  }

  document.querySelectorAll("button.copy").forEach((button) => button.addEventListener("click", () => copy(button)));
  document.querySelectorAll("table.sortable").forEach((table) => {
    table.querySelectorAll("thead th").forEach((header, column) => {
      header.querySelector("button").addEventListener("click", () => sort(table, column, header));
    });
  });
  dark.addEventListener("change", recolour);
  matchMedia("print").addEventListener("change", recolour);
  const holders = [...document.querySelectorAll("script[data-figure]")];
  Promise.all(holders.map(draw)).then(() => { document.documentElement.dataset.drawn = String(plots.length); });
})();
