"use strict";
// Charts: drawn once, when they come into view, and exported as CSV.
(function () {
  // Restore the browser's String.trim: Dash replaces it by a slow polyfill, and plotly calls it for every colour of every point.
  const cleanFrame = document.head.appendChild(document.createElement("iframe"));
  String.prototype.trim = cleanFrame.contentWindow.String.prototype.trim;
  cleanFrame.remove();

  const VIEW_MARGIN = "300px", TITLE_LINE_HEIGHT = 20, TITLE_CHARACTER_WIDTH = 7.7;
  const pending = new Map();  // plot -> function that draws it
  const draw = (plot) => { pending.get(plot)?.(); pending.delete(plot); };
  const observer = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target, boundingClientRect }) => {
    observer.unobserve(target);
    if (boundingClientRect.top < innerHeight) draw(target);
    else setTimeout(draw, 0, target);  // after those that are on screen
  }), { rootMargin: VIEW_MARGIN });
  const inView = (plot) => new Promise((resolve) => { pending.set(plot, resolve); observer.observe(plot); });
  addEventListener("beforeprint", () => pending.forEach((draw) => draw()));

  // plotly.js assigns window.Plotly once it is loaded; its drawing functions are wrapped at that moment.
  // It loads while the server computes the first page; charts that come earlier wait for the same file.
  let library, loading;
  const loadLibrary = () => {
    const src = window._dashPlotlyJSURL;  // set by Dash soon after it starts
    if (!src) setTimeout(loadLibrary, 20);
    else loading = library ?? new Promise((onload, onerror) => document.head.append(Object.assign(document.createElement("script"), { src, onload, onerror })));
  };
  addEventListener("load", loadLibrary);
  Object.defineProperty(window, "Plotly", { configurable: true, get: () => library ?? loading, set: (loaded) => {
    library = loaded;
    const { react, Plots: { resize } } = loaded;
    const withTopMargin = (plot, added) => {
      plot.layout.margin = { ...plot.layout.margin, t: plot._fullLayout._size.t + added };
      return react(plot, plot.data, plot.layout, plot._context);
    };
    const wrapTitle = (plot) => {
      const { title } = plot.layout, visible = plot.closest("[role=group]") ?? plot;  // a wide chart scrolls within it
      const room = Math.floor(visible.clientWidth / TITLE_CHARACTER_WIDTH), before = (title?.text ?? "").split("<br>");
      if (before.every((line) => line.length <= room)) return null;
      const lines = [];
      for (const word of before.join(" ").split(" ")) {
        if (lines.length && lines.at(-1).length + word.length < room) lines.push(`${lines.pop()} ${word}`);
        else lines.push(word);
      }
      const added = TITLE_LINE_HEIGHT * (lines.length - before.length);
      plot.layout.title = { ...title, text: lines.join("<br>"), pad: { ...title.pad, t: (title.pad?.t ?? 0) + added } };
      return withTopMargin(plot, added);
    };
    const clearTitle = (plot) => {  // a legend has more rows in a narrow chart
      const [title, legend] = [".g-gtitle", ".legend"].map((part) => plot.querySelector(part)?.getBoundingClientRect());
      const overlap = title?.width && legend ? Math.ceil(title.bottom - legend.top) : 0;
      return overlap > 0 ? withTopMargin(plot, overlap) : null;
    };
    loaded.react = async (plot, ...figure) => {
      if (!plot._fullLayout && plot.isConnected) await inView(plot);
      if (!plot.isConnected) return plot;
      await react(plot, ...figure);
      await wrapTitle(plot);
      await clearTitle(plot);
      if (plot.layout.meta?.cell_links && !plot.openCell) {
        plot.openCell = ({ points: [{ pointNumber: [row, column], data }] }) => {
          const links = plot.layout.meta.cell_links[row], url = new URL(links[column] ?? links[0], location.href);
          if (typeof data.meta === "string") url.searchParams.set("model", data.meta);
          window.headscopeFollow(url.href);
        };
        plot.on("plotly_click", plot.openCell);
      }
      if (plot.layout.meta?.heads && !plot.marksRow) {
        plot.marksRow = true;
        plot.on("plotly_hover", ({ points: [point] }) => window.headscopeMarkRow(point.customdata));
        plot.on("plotly_unhover", () => window.headscopeMarkRow(null));
      }
      return plot;
    };
    // Dash resizes a chart twice after drawing it; plotly would redraw it even at an unchanged size.
    loaded.Plots.resize = (plot) =>
      !plot._fullLayout || plot._fullLayout.width === plot.clientWidth ? Promise.resolve(plot) : resize(plot);
  } });

  // Requests the deferred blocks of a page, once per page, when its visible charts are drawn: both need the processor.
  let requested = null;
  window.headscopeLoadDeferred = () => {
    const placeholder = document.querySelector("main .loading")?.parentElement;
    const isMissing = (chart) => !chart.querySelector(".main-svg") && chart.getBoundingClientRect().top < innerHeight;
    if (!placeholder || placeholder === requested) return;
    if ([...document.querySelectorAll("main figure")].some(isMissing)) requestAnimationFrame(window.headscopeLoadDeferred);
    else {
      requested = placeholder;
      window.dash_clientside.set_props({ ...JSON.parse(placeholder.id), part: "request" }, { data: {} });
    }
  };

  const plainText = (text) => (text ?? "").replace(/<[^>]*>/g, " ").replace(/\s+/g, " ").trim();
  const withoutSpaces = (text) => plainText(text).replaceAll(" ", "");  // labels are wrapped to different widths
  // One row per point: its model and series, the head if points are heads, and the values under the titles of the axes.
  window.headscopeChartCsv = (plot) => {
    const layout = plot._fullLayout, meta = plot.layout.meta ?? {}, hasHeads = Boolean(meta.heads);
    const titleOf = (item, kind) => (item?.title?.text === layout._dfltTitle[kind] ? "" : plainText(item?.title?.text));
    const axisTitle = (name, kind) => titleOf(layout[kind + "axis" + name.slice(1)], kind) || titleOf(layout[kind + "axis"], kind) || kind;
    const traces = plot._fullData.filter((trace) => trace.visible === true && trace.hoverinfo !== "skip");
    const first = traces.find((trace) => trace.type === "heatmap") ?? traces[0] ?? {};
    const [x, y] = [plainText(meta.x) || axisTitle(first.xaxis ?? "x", "x"), plainText(meta.y) || axisTitle(first.yaxis ?? "y", "y")];
    const isMatrix = first.type === "heatmap", value = plainText(meta.value) || titleOf(first.colorbar, "colorbar") || "value";
    const keepsX = !hasHeads || Boolean(meta.x), keepsY = !hasHeads || Boolean(meta.y);
    const headColumns = hasHeads ? ["layer", "head", "KV group"] : [];
    const matrixCells = (xCell, yCell, number) => [...(keepsX ? [xCell] : []), ...(keepsY ? [yCell] : []), number];
    const valueColumns = isMatrix ? matrixCells(x, y, value) : hasHeads && meta.value ? [x, value] : [x, y];
    const rows = [["model", "series", ...headColumns, ...valueColumns]];
    const headCells = (point) => (hasHeads ? [0, 1, 2].map((index) => (point?.[index] < 0 ? "" : point?.[index])) : []);
    const models = new Map((meta.models ?? []).map((label) => [withoutSpaces(label), plainText(label)]));
    for (const trace of traces) {
      const name = /^trace \d+$/.test(trace.name) ? "" : plainText(trace.name), named = models.get(withoutSpaces(name));
      const panelModel = typeof trace.meta === "string" ? trace.meta : plainText(meta.model);
      const labels = named === undefined ? [panelModel, name === panelModel ? "" : name] : [named, ""];
      const raw = plot.data[trace.index] ?? trace;
      if (trace.type === "heatmap") {
        trace.z.forEach((line, i) => Array.from(line, (z, j) => {
          const point = trace.customdata?.[i]?.[j], number = meta.value_index === undefined ? z : point?.[meta.value_index];
          rows.push([...labels, ...headCells(point), ...matrixCells(trace.x[j], trace.y[i], number)]);
        }));
      } else Array.from(trace.y ?? [], (number, i) => rows.push([...labels, ...headCells(trace.customdata?.[i] ?? raw.customdata?.[i]), trace.x[i], number]));
    }
    const filled = rows.filter((row) => row.at(-1) !== undefined && row.at(-1) !== null && !Number.isNaN(row.at(-1)));
    const unused = [0, 1].filter((column) => filled.slice(1).every((row) => !row[column]));
    const cell = (item) => {
      const text = typeof item === "string" ? plainText(item) : item ?? "";
      return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    return filled.map((row) => row.filter((_, column) => !unused.includes(column)).map(cell).join(",")).join("\n");
  };
})();
