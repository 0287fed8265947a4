// Draws the figures of this page; colours are custom properties of the style sheet, resolved anew when the scheme changes.
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

  function draw(element, figure) {
    const style = getComputedStyle(document.documentElement);
    const narrow = element.clientWidth < 480;
    const layout = resolved(figure.layout, style);
    layout.height = figure.height;
    layout.autosize = true;
    layout.font = { family: style.getPropertyValue("--sans"), size: narrow ? 11 : 12.5, color: style.getPropertyValue("--soft").trim() };
    layout.dragmode = narrow ? false : "zoom";
    for (const axis of [layout.xaxis, layout.yaxis]) axis.fixedrange = narrow;
    const options = { responsive: true, displayModeBar: false, doubleClick: "reset", scrollZoom: false };
    return Plotly.react(element, resolved(figure.data, style), layout, options);
  }

  const all = [...document.querySelectorAll(".chart")];
  const drawn = new Set();
  function show(element) {
    drawn.add(element);
    return draw(element, figures[Number(element.dataset.figure)]);
  }
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting) {
        near.unobserve(entry.target);
        show(entry.target);
      }
  }, { rootMargin: "1200px" });
  all.forEach((element) => near.observe(element));
  dark.addEventListener("change", () => drawn.forEach(show));
  addEventListener("beforeprint", () => all.filter((element) => !drawn.has(element)).forEach(show));
  document.documentElement.dataset.charts = "ready";
})();
