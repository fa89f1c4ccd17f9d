// Draws the figures of the report from the JSON in the page, in the colours of the reader's theme.
"use strict";
(() => {
  const { figures, dark } = JSON.parse(document.getElementById("data").textContent);
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  // Fields of a specification that hold colours; a text that looks like a colour stays what it is.
  const painted = new Set(["color", "bgcolor", "bordercolor", "gridcolor", "linecolor"]);
  const printed = 680; // pixels between the margins of an A4 page
  let printing = false;

  function themed(value, key) {
    if (Array.isArray(value)) return value.map((v) => themed(v, key));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, k)]));
    }
    return painted.has(key) && Object.hasOwn(dark, value) ? dark[value] : value;
  }

  function draw(name) {
    const element = document.getElementById("chart-" + name);
    const { data, layout } = themedFor(figures[name]);
    const config = {
      displaylogo: false,
      displayModeBar: false, // it covers what it stands on, and the keys below do the same
      showSendToCloud: false,
      showTips: false,
      responsive: !printing,
      doubleClick: "reset",
    };
    return Plotly.react(element, data, printing ? { ...layout, width: printed } : layout, config).then(() => {
      element.dataset.drawn = "yes";
    });
  }

  // What the pointer does by dragging, the keyboard does by + − ← → and 0.
  function steer(event) {
    const chart = event.currentTarget;
    const [low, high] = chart._fullLayout.xaxis.range;
    const middle = (low + high) / 2;
    const half = (high - low) / 2;
    const range = {
      "+": [middle - half / 2, middle + half / 2],
      "-": [middle - half * 2, middle + half * 2],
      ArrowLeft: [low - half / 2, high - half / 2],
      ArrowRight: [low + half / 2, high + half / 2],
    }[event.key];
    const whole = figures[chart.id.slice("chart-".length)].layout.xaxis.range;
    if (range) Plotly.relayout(chart, { "xaxis.range": range });
    else if (event.key === "0") Plotly.relayout(chart, whole ? { "xaxis.range": [...whole] } : { "xaxis.autorange": true });
    else return;
    event.preventDefault();
  }

  const themedFor = (figure) => (night.matches && !printing ? themed(figure) : structuredClone(figure));

  // One after the other, with a pause for the reader's scrolling and clicking between two.
  async function drawAll() {
    for (const name of Object.keys(figures)) {
      await draw(name);
      await new Promise((resume) => setTimeout(resume));
    }
    document.documentElement.dataset.drawn = "all";
    performance.mark("drawn");
  }

  function reprint(now) {
    printing = now;
    Object.keys(figures).forEach(draw);
  }

  document.querySelectorAll(".chart[tabindex]").forEach((chart) => chart.addEventListener("keydown", steer));
  night.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => reprint(true));
  window.addEventListener("afterprint", () => reprint(false));
  drawAll();
})();
