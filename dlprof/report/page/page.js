// Draws the figures of the report from the JSON in the page, in the colours of the reader's theme.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = data.dark;

  // In lists of texts each part is written once, and so are lists of numbers that several figures share.
  function unpacked(value) {
    if (Array.isArray(value)) return value[0]?.constructor === Object ? value.map(unpacked) : value;
    if (value?.constructor !== Object) return value;
    if (value.texts && value.of) return value.of.map((at) => [at].flat().map((i) => value.texts[i]).join(" · "));
    if ("list" in value) return data.lists[value.list];
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, unpacked(v)]));
  }

  const figures = unpacked(data.figures);
  const night = window.matchMedia("(prefers-color-scheme: dark)");
  // Fields of a specification that hold colours; a text that looks like a colour stays what it is.
  const painted = new Set(["color", "bgcolor", "bordercolor", "gridcolor", "linecolor", "fillcolor"]);
  const printed = 680; // pixels between the margins of an A4 page
  const small = window.matchMedia("(max-width: 560px)"); // as in page.css
  const narrow = 480; // pixels; narrower figures have fewer ticks and shorter labels
  const letter = 6.6; // pixels of a letter in a figure, in the mean
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
    if (element.clientWidth < narrow && !printing) fold(layout, element.clientWidth);
    const config = {
      displaylogo: false,
      displayModeBar: false, // it covers the figure, and the keys below do the same
      showSendToCloud: false,
      showTips: false,
      responsive: !printing,
      doubleClick: "reset",
    };
    return Plotly.react(element, data, printing ? { ...layout, width: printed } : layout, config).then(() => {
      const first = !element.dataset.drawn;
      if (layout.meta?.axis === "time" && first) element.on("plotly_relayout", () => follow(element));
      if (layout.meta?.click === "zoom") {
        if (first) {
          element.on("plotly_click", widen);
          element.on("plotly_relayout", () => fit(element));
        }
        fit(element);
      }
      element.dataset.drawn = "yes";
    });
  }

  // Figures over the run's time are zoomed together.
  function follow(chart) {
    const [low, high] = chart._fullLayout.xaxis.range;
    for (const name of Object.keys(figures)) {
      const other = document.getElementById("chart-" + name);
      if (figures[name].layout.meta?.axis !== "time" || !other._fullLayout) continue;
      const [from, to] = other._fullLayout.xaxis.range;
      if (from !== low || to !== high) Plotly.relayout(other, { "xaxis.range": [low, high] });
    }
  }

  // The first letters of a name; "" where they would be too few.
  const short = (name, most) =>
    name.length <= most ? name : most > 3 ? name.slice(0, most - 1).replace(/&[^;]*$/, "") + "…" : "";

  // In a narrow figure the labels beside it take less than half of it, and those below it do not touch.
  function fold({ margin, xaxis, yaxis }, width) {
    const most = Math.round(0.45 * width);
    if (margin.l > most) {
      margin.l = most;
      yaxis.ticktext = yaxis.ticktext?.map((name) => short(name, Math.floor(most / letter) - 1));
    }
    if (xaxis.tickvals) return;
    xaxis.nticks = Math.max(2, Math.floor((width - margin.l - margin.r) / 50));
    xaxis.tickangle = 0;
  }

  // Names of frames are cut to the width of the frames.
  function fit(chart) {
    const [low, high] = chart._fullLayout.xaxis.range;
    const scale = chart._fullLayout._size.w / (high - low) / letter;
    const { base, x } = chart.data[0];
    const shown = figures[chart.id.slice("chart-".length)].data[0].text.map((name, i) => {
      const most = Math.floor((Math.min(base[i] + x[i], high) - Math.max(base[i], low)) * scale) - 1;
      return short(name, most);
    });
    Plotly.restyle(chart, { text: [shown] });
  }

  // Zoom to the frame that is clicked on.
  function widen({ event, points: [frame] }) {
    Plotly.relayout(event.target.closest(".chart"), { "xaxis.range": [frame.base, frame.base + frame.value] });
  }

  // Zoom and move by the keys + − ← → and 0.
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

  // One after the other; scrolling and clicking are handled between two.
  async function drawAll() {
    delete document.documentElement.dataset.drawn;
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

  // The value of a formatted number, to sort by: "718.0 µs" is less than "5.57 ms", and no number is least.
  const multiples = { n: 1e-9, µ: 1e-6, m: 1e-3, k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15 };
  function amount(text) {
    const found = /^(<\s*)?([−-]?)([\d.,]+)\s*([nµmkMGTP](?=s|B|FLOP|W|Hz))?/.exec(text);
    if (!found) return -Infinity;
    const size = Number(found[3].replaceAll(",", "")) * (multiples[found[4]] ?? 1);
    return (found[2] ? -size : size) - (found[1] ? 1e-9 : 0);
  }

  const words = new Intl.Collator("en", { numeric: true });

  // Compares rows by a column: by numbers, or by words; a row of means stays first.
  function comparing(table, column, up) {
    const figures = table.tHead.rows[0].cells[column].classList.contains("num");
    const keys = new Map();
    const key = (row) => {
      if (!keys.has(row)) {
        const text = row.cells[column].textContent.trim();
        keys.set(row, figures ? amount(text) : text);
      }
      return keys.get(row);
    };
    const apart = figures ? (a, b) => (a === b ? 0 : a - b) : words.compare;
    const mean = (row) => row.classList.contains("mean");
    return (a, b) => mean(b) - mean(a) || (up ? 1 : -1) * apart(key(a), key(b));
  }

  // A button in each heading sorts by it: `arrange` brings the rows in the order of a comparison.
  function sortable(table, arrange) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      // Numbers are sorted largest first, words from A on.
      button.addEventListener("click", () => {
        const before = head.getAttribute("aria-sort");
        const up = before ? before === "descending" : !head.classList.contains("num");
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        arrange(comparing(table, column, up));
      });
    });
  }

  // A field above a table: `choose` shows the rows with a text in them, and returns how many these are.
  function filterable(table, choose) {
    const line = document.createElement("div");
    line.className = "filter";
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "Filter rows";
    input.setAttribute("aria-label", "Filter the rows of " + table.parentElement.getAttribute("aria-label"));
    const matches = document.createElement("span");
    matches.setAttribute("role", "status");
    input.addEventListener("input", () => {
      const wanted = input.value.trim().toLowerCase();
      const number = choose(wanted);
      matches.textContent = wanted ? `${number} of ${table.tBodies[0].rows.length}` : "";
    });
    line.append(input, matches);
    table.parentElement.before(line);
  }

  const filtered = 10; // tables with so many rows have a filter
  const holds = (row, wanted) => (row.textContent + row.cells[0].title).toLowerCase().includes(wanted);

  function flat(table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    sortable(table, (compare) => body.append(...[...body.rows].sort(compare)));
    if (rows.length < filtered) return;
    filterable(table, (wanted) => rows.filter((row) => !(row.hidden = !holds(row, wanted))).length);
  }

  // The rows of a tree open and close, by a button around the name or by the arrow keys on it. Sorted are the rows inside
  // a row, each with all that is inside it; found rows are shown with those around them.
  function tree(table) {
    const body = table.tBodies[0];
    const top = [];
    const above = [];
    for (const row of body.rows) {
      above.length = Math.min(above.length, Number(row.dataset.depth));
      const node = { row, inside: [] };
      (above.at(-1)?.inside ?? top).push(node);
      above.push(node);
    }
    const rows = (nodes) => nodes.flatMap(({ row, inside }) => [row, ...rows(inside)]);
    const show = (nodes, shown) =>
      nodes.forEach(({ row, inside }) => {
        row.hidden = !shown;
        show(inside, shown && row.dataset.open === "1");
      });
    const open = (row, wide) => {
      row.dataset.open = wide ? "1" : "0";
      row.querySelector("button").setAttribute("aria-expanded", wide);
      show(top, true);
    };
    const grow = (nodes) =>
      nodes.forEach(({ row, inside }) => {
        grow(inside);
        if (!inside.length) return;
        const button = document.createElement("button");
        button.type = "button";
        button.append(row.cells[0].firstElementChild);
        row.cells[0].prepend(button);
        open(row, row.dataset.open === "1");
        button.addEventListener("click", () => open(row, row.dataset.open !== "1"));
        button.addEventListener("keydown", ({ key }) => {
          if (key === "ArrowRight" || key === "ArrowLeft") open(row, key === "ArrowRight");
        });
      });
    const sort = (nodes, compare) => {
      nodes.sort((a, b) => compare(a.row, b.row));
      nodes.forEach(({ inside }) => sort(inside, compare));
    };
    const find = (nodes, wanted) =>
      nodes.filter(({ row, inside }) => !(row.hidden = !(find(inside, wanted) + holds(row, wanted)))).length;
    grow(top);
    sortable(table, (compare) => {
      sort(top, compare);
      body.append(...rows(top));
    });
    filterable(table, (wanted) => {
      if (wanted) find(top, wanted);
      else show(top, true);
      return rows(top).filter((row) => holds(row, wanted)).length;
    });
  }

  document.querySelectorAll("table.sorts").forEach(flat);
  document.querySelectorAll("table.tree").forEach(tree);

  // On a narrow screen a table that would be cut becomes a list, with the headings beside the cells.
  function stack() {
    for (const table of document.querySelectorAll(".scroll > table")) {
      const region = table.parentElement;
      const { scrollTop } = region; // lost where the table is shorter for a moment
      table.classList.remove("stacked");
      const cut = table.scrollWidth > region.clientWidth;
      if (!cut || !region.clientWidth || !small.matches) continue;
      const heads = [...table.tHead.rows[0].cells].map((head) => head.textContent);
      for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, i) => i && heads[i] && (cell.dataset.head = heads[i]));
      table.classList.add("stacked");
      region.scrollTop = scrollTop;
    }
  }
  stack();
  window.addEventListener("resize", stack);
  document.addEventListener("toggle", stack, true);

  // Shows for a moment on a button what became of a click.
  function answer(button, text, seconds = 2) {
    button.dataset.label ??= button.textContent;
    button.textContent = text;
    clearTimeout(Number(button.dataset.timer));
    button.dataset.timer = setTimeout(() => (button.textContent = button.dataset.label), seconds * 1000);
  }

  // Buttons that put a text on the clipboard: a command of the page, or the report for an agent.
  async function copy({ currentTarget: button }) {
    const text = button.dataset.copy ? document.getElementById(button.dataset.copy).textContent.trim() : data.agent;
    const area = document.createElement("textarea");
    try {
      await navigator.clipboard.writeText(text);
      answer(button, "Copied");
    } catch {
      // Not allowed, or not there, as on a page that came over plain http.
      area.value = text;
      button.after(area);
      area.select();
      answer(button, document.execCommand("copy") ? "Copied" : "Not copied");
      area.remove();
      button.focus();
    }
  }
  document.querySelectorAll("button.copy").forEach((button) => button.addEventListener("click", copy));

  // The timelines of the page as a trace: each a process, its lanes the threads.
  function trace() {
    const scales = { ns: 1e-3, µs: 1, ms: 1e3, s: 1e6 };
    const decoded = new DOMParser();
    const plain = (text) => (/&/.test(text) ? decoded.parseFromString(text, "text/html").body.textContent : text);
    const timelines = Object.entries(figures).filter(([, { data, layout }]) => data[0]?.base && !layout.meta);
    return timelines.flatMap(([name, { data: [bars], layout }], pid) => {
      const scale = scales[layout.xaxis.ticksuffix.trim()];
      const title = document.getElementById("chart-" + name).getAttribute("aria-label");
      const lanes = layout.yaxis.ticktext.map((lane, tid) => ({ ph: "M", name: "thread_name", pid, tid, args: { name: plain(lane) } }));
      const spans = bars.x.map((width, i) => {
        const said = plain(bars.hovertext[i]).split(" · ");
        const [cat] = said.splice(-2).reverse();
        return { ph: "X", pid, tid: bars.y[i], ts: bars.base[i] * scale, dur: width * scale, name: said.join(" · "), cat };
      });
      return [{ ph: "M", name: "process_name", pid, args: { name: title } }, ...lanes, ...spans];
    });
  }

  // Hands the timelines to Perfetto's page, from window to window. Nothing is asked for until the click.
  const perfetto = document.getElementById("perfetto");
  perfetto?.addEventListener("click", () => {
    const there = window.open(perfetto.dataset.page);
    if (!there) return answer(perfetto, "The browser opened no window", 8);
    const ask = setInterval(() => there.postMessage("PING", "*"), 200);
    const end = () => {
      clearInterval(ask);
      clearTimeout(late);
      window.removeEventListener("message", give);
    };
    const late = setTimeout(() => {
      end();
      answer(perfetto, "No answer; " + perfetto.title, 20);
    }, 20_000);
    function give(event) {
      if (event.source !== there || event.data !== "PONG") return;
      end();
      const buffer = new TextEncoder().encode(JSON.stringify({ traceEvents: trace() })).buffer;
      const origin = new URL(perfetto.dataset.page).origin;
      there.postMessage({ perfetto: { buffer, title: document.title, fileName: "step.json" } }, origin);
    }
    window.addEventListener("message", give);
  });

  // Pages that share one plotly.js may be opened without it; their tables have the same values.
  if (typeof Plotly === "undefined") {
    const missing = document.createElement("p");
    missing.className = "note";
    missing.setAttribute("role", "status");
    missing.textContent = "The charts are not drawn: the file plotly-basic.min.js, which this page loads, is missing. The tables have the same values.";
    document.querySelector("header.verdict").append(missing);
    document.querySelectorAll(".chart, .keys, .legend").forEach((element) => element.remove());
    document.querySelectorAll("details.figures").forEach((table) => (table.open = true));
    document.documentElement.dataset.drawn = "none";
    return;
  }

  document.querySelectorAll(".chart[tabindex]").forEach((chart) => chart.addEventListener("keydown", steer));
  night.addEventListener("change", drawAll);
  small.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => reprint(true));
  window.addEventListener("afterprint", () => reprint(false));
  drawAll();
})();
