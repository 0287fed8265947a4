// Draws the figures of this page, and anew when the scheme changes, whose colours are custom properties of the style
// sheet, or when a chart becomes narrow or wide.
"use strict";
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const figures = JSON.parse(document.getElementById("figures").textContent);

  function resolved(value, style) {
    if (Array.isArray(value)) return value.map((item) => resolved(item, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, style)]));
    const found = typeof value === "string" && value.match(/^var\((--[\w-]+)\)(?:\/([\d.]+))?$/);
    if (!found) return value;
    const colour = style.getPropertyValue(found[1]).trim();
    return found[2] ? colour + Math.round(255 * found[2]).toString(16).padStart(2, "0") : colour;
  }

  // on a narrow page long names of arms stand on several lines, for which the chart grows
  function wrapped(name) {
    return name.split("<br>").flatMap((line) => line.split(" ").reduce((lines, word) => {
      const last = lines[lines.length - 1];
      return last && last.length + word.length < 24 ? [...lines.slice(0, -1), `${last} ${word}`] : [...lines, word];
    }, [])).join("<br>");
  }

  function wrap(layout, data) {
    const names = [...new Set(data.flatMap((trace) => trace.y))], texts = names.map(wrapped);
    const lines = Math.max(0, ...texts.map((text) => text.split("<br>").length));
    Object.assign(layout.yaxis, { tickmode: "array", tickvals: names, ticktext: texts });
    layout.height = Math.max(layout.height, 80 + names.length * (13 * lines + 8));
  }

  function draw(element, figure, narrow) {
    const style = getComputedStyle(document.documentElement);
    const layout = resolved(figure.layout, style);
    layout.height = figure.height;
    layout.autosize = true;
    layout.font = { family: style.getPropertyValue("--sans"), size: narrow ? 11 : 12.5, color: style.getPropertyValue("--soft").trim() };
    layout.dragmode = narrow ? false : "zoom";
    if (narrow && layout.yaxis.type === "category" && !layout.yaxis.tickmode) wrap(layout, figure.data);
    element.style.height = `${layout.height}px`;
    for (const axis of [layout.xaxis, layout.yaxis]) axis.fixedrange = narrow;
    const options = { responsive: true, displayModeBar: false, doubleClick: "reset", scrollZoom: false };
    return Plotly.react(element, resolved(figure.data, style), layout, options);
  }

  const all = [...document.querySelectorAll(".chart")];
  const drawn = new Map(); // charts, and whether each is drawn as a narrow one
  const isNarrow = (element) => element.clientWidth < 480;
  function show(element) {
    drawn.set(element, isNarrow(element));
    return draw(element, figures[Number(element.dataset.figure)], drawn.get(element));
  }
  function follow() {
    drawn.forEach((narrow, element) => narrow === isNarrow(element) || show(element));
  }
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting) {
        near.unobserve(entry.target);
        show(entry.target);
      }
  }, { rootMargin: "1200px" });
  all.forEach((element) => near.observe(element));
  dark.addEventListener("change", () => drawn.forEach((_, element) => show(element)));
  let pause;
  addEventListener("resize", () => {
    clearTimeout(pause);
    pause = setTimeout(follow, 250); // after the chart library, which waits for 100 ms
  });
  addEventListener("beforeprint", () => all.filter((element) => !drawn.has(element)).forEach(show));
  document.documentElement.dataset.charts = "ready";
})();
