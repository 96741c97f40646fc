"use strict";
// Charts in the browser: drawn when they come into view, not twice, and their numbers as a table.
(function () {
  const NEAR = "300px";
  const waiting = new Map();
  const watch = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => {
    watch.unobserve(target);
    waiting.get(target)?.();
    waiting.delete(target);
  }), { rootMargin: NEAR });
  const seen = (plot) => new Promise((done) => { waiting.set(plot, done); watch.observe(plot); });
  addEventListener("beforeprint", () => waiting.forEach((draw) => draw()));

  // plotly.js sets window.Plotly when it is loaded; what it draws with is changed then.
  let library;
  Object.defineProperty(window, "Plotly", { configurable: true, get: () => library, set: (loaded) => {
    library = loaded;
    const { react, Plots: { resize } } = loaded;
    loaded.react = async (plot, ...figure) => {
      if (!plot._fullLayout && plot.isConnected) await seen(plot);
      if (!plot.isConnected) return plot;
      await react(plot, ...figure);
      if (plot.layout.meta?.cell_links && !plot.leads) {
        plot.leads = ({ points: [{ pointNumber: [row, column] }] }) => {
          const { pathname, search } = new URL(plot.layout.meta.cell_links[row][column], location.href);
          window.dash_clientside.set_props("url", { pathname, search });
        };
        plot.on("plotly_click", plot.leads);
      }
      return plot;
    };
    // Dash resizes a chart twice after drawing it, and plotly then draws it anew even where the size is right.
    loaded.Plots.resize = (plot) =>
      !plot._fullLayout || plot._fullLayout.width === plot.clientWidth ? Promise.resolve(plot) : resize(plot);
  } });

  // The rest of a page is asked for when what is seen of it is drawn, since both take the processor.
  window.headscopeRest = () => {
    const place = document.querySelector("main .waiting")?.parentElement;
    const missing = (chart) => !chart.querySelector(".main-svg") && chart.getBoundingClientRect().top < innerHeight;
    if (!place) return;
    if ([...document.querySelectorAll("main figure")].some(missing)) requestAnimationFrame(window.headscopeRest);
    else window.dash_clientside.set_props(JSON.parse(place.id), { n_clicks: 1 });
  };

  const plain = (text) => (text ?? "").replace(/<[^>]*>/g, " ").replace(/\s+/g, " ").trim();
  // A row a point: model or series, the head where points are heads, and the axes by their names.
  window.headscopeNumbers = (plot) => {
    const layout = plot._fullLayout, meta = plot.layout.meta ?? {}, heads = Boolean(meta.heads);
    const axis = (name, kind) => plain(layout[kind + "axis" + name.slice(1)]?.title?.text) || plain(layout[kind + "axis"]?.title?.text) || kind;
    const traces = plot._fullData.filter((trace) => trace.visible === true && trace.hoverinfo !== "skip");
    const first = traces.find((trace) => trace.type === "heatmap") ?? traces[0] ?? {};
    const [x, y] = [plain(meta.x) || axis(first.xaxis ?? "x", "x"), plain(meta.y) || axis(first.yaxis ?? "y", "y")];
    const maps = first.type === "heatmap", value = plain(meta.value) || plain(first.colorbar?.title?.text) || "value";
    const place = heads ? ["layer", "head", "key group"] : [];
    const rest = maps ? (heads ? [value] : [x, y, value]) : heads && meta.value ? [x, value] : [x, y];
    const rows = [["model", ...place, ...rest]];
    const told = (point) => (heads ? [0, 1, 2].map((at) => (point?.[at] < 0 ? "" : point?.[at])) : []);
    for (const trace of traces) {
      const called = /^trace \d+$/.test(trace.name) ? meta.model ?? "" : plain(trace.name);
      const raw = plot.data[trace.index] ?? trace;
      if (trace.type === "heatmap") {
        trace.z.forEach((line, i) => Array.from(line, (z, j) => {
          const point = trace.customdata?.[i]?.[j], number = meta.value_index === undefined ? z : point?.[meta.value_index];
          rows.push([called, ...told(point), ...(heads ? [number] : [trace.x[j], trace.y[i], number])]);
        }));
      } else Array.from(trace.y ?? [], (number, i) => rows.push([called, ...told(trace.customdata?.[i] ?? raw.customdata?.[i]), trace.x[i], number]));
    }
    const cell = (item) => (/[",\n]/.test(String(item ?? "")) ? `"${String(item).replaceAll('"', '""')}"` : item ?? "");
    return rows.filter((row) => row.at(-1) !== undefined && row.at(-1) !== null).map((row) => row.map(cell).join(",")).join("\n");
  };
})();
