"use strict";
// What happens in the browser: the URL is the state, so a control, a click or a lasso only changes the URL.
(function () {
  const root = document.documentElement;

  const searched = (changes) => {
    const query = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(changes)) {
      query.delete(name);
      const told = name === "layers" && value ? [value.join("-")] : [value].flat();
      told.filter((item) => item !== null && item !== undefined && item !== "").forEach((item) => query.append(name, item));
    }
    const text = query.toString();
    return text ? "?" + text : "";
  };
  const go = (pathname, search) => window.dash_clientside.set_props("url", { pathname, search });
  const open = ([layer, head, group]) => go(`/head/${layer}.${head < 0 ? "g" + group : head}`, location.search);
  // The value of the chart that the event came from; the others may hold what happened before.
  const fired = (values) => {
    const context = window.dash_clientside.callback_context;
    const at = context.inputs_list[0].findIndex((input) => input.id.chart === context.triggered_id?.chart);
    return values[at];
  };
  const same = (a, b) => JSON.stringify(a ?? "") === JSON.stringify(b ?? "");

  window.dash_clientside = Object.assign(window.dash_clientside || {}, {
    headscope: {
      // The page says what it shows: title, place in the navigation, values of the controls.
      reflect({ title, path, values }) {
        calm();
        document.title = `${title} · headscope`;
        document.querySelectorAll("nav a").forEach((link) =>
          link.getAttribute("href") === path ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current"));
        for (const [control, value] of Object.entries(values)) window.dash_clientside.set_props({ control }, { value });
      },
      steer(values, shown) {
        const controls = window.dash_clientside.callback_context.inputs_list[0].map((input) => input.id.control);
        const changed = controls.map((control, at) => [control, values[at]])
          .filter(([control, value]) => control in shown.values && !same(value, shown.values[control]));
        if (changed.length) go(location.pathname, searched(Object.fromEntries(changed)));
      },
      open(clicks) {
        const place = fired(clicks)?.points?.[0]?.customdata;
        if (place) open(place);
      },
      pick(selections) {
        const places = fired(selections)?.points?.map((point) => point.customdata).filter(Boolean);
        if (places) go(location.pathname, searched({ pick: [...new Set(places.map(([layer, head]) => `${layer}.${head}`))].join("_") }));
      },
      csv: (clicks) => (clicks ? true : window.dash_clientside.no_update),
    },
  });

  window.dashAgGridFunctions = Object.assign(window.dashAgGridFunctions || {}, {
    openHead(event) {
      const clicked = event.type === "cellClicked" && ["layer", "head"].includes(event.colDef.field);
      if (clicked || event.event?.key === "Enter") open([event.data.layer, event.data.head]);
    },
  });

  // Links inside the app change the URL without loading the app again.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href]:not([download])");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || link.origin !== location.origin) return;
    if (link.getAttribute("href").startsWith("#")) return;
    event.preventDefault();
    go(link.pathname, link.classList.contains("keep") ? location.search : link.search);
    window.scrollTo(0, 0);
  });

  // Light and dark: what the system says, until the button says otherwise.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (localStorage.getItem("theme") ?? (system.matches ? "dark" : "light")) === "dark";
  const paint = () => {
    root.dataset.mantineColorScheme = root.dataset.agThemeMode = dark() ? "dark" : "light";
  };
  new MutationObserver(() => { if ((root.dataset.mantineColorScheme === "dark") !== dark()) paint(); })
    .observe(root, { attributeFilter: ["data-mantine-color-scheme"] });
  system.addEventListener("change", paint);
  paint();

  // Dash resizes a chart twice after drawing it, and plotly then draws it anew even where the size is right.
  const calm = () => {
    const { Plots } = window.Plotly ?? {};
    if (!Plots || Plots.calm) return;
    const resize = Plots.resize;
    Plots.calm = true;
    Plots.resize = (plot) => (plot._fullLayout?.width === plot.clientWidth ? Promise.resolve(plot) : resize(plot));
  };

  const data = (plot) => {
    const rows = [["series", "x", "y", "z"]];
    for (const trace of plot._fullData.filter((trace) => trace.visible === true)) {
      const { x = [], y = [], z } = trace;
      if (z) z.forEach((line, i) => line.forEach((value, j) => rows.push([trace.name, x[j], y[i], value])));
      else Array.from(y, (value, i) => rows.push([trace.name, x[i], value, ""]));
    }
    const cell = (value) => (/[",\n]/.test(String(value ?? "")) ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
    return rows.map((row) => row.map(cell).join(",")).join("\n");
  };
  const download = (href, name) => Object.assign(document.createElement("a"), { href, download: name }).click();
  const save = (kind, plot) => {
    const name = plot.layout.title.text.replace(/[^A-Za-z0-9]+/g, "-").toLowerCase();
    if (kind === "csv") download(URL.createObjectURL(new Blob([data(plot)], { type: "text/csv" })), `${name}.csv`);
    else window.Plotly.downloadImage(plot, { format: kind, filename: name, scale: kind === "png" ? 2 : 1 });
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.save) save(button.dataset.save, button.closest("figure").querySelector(".js-plotly-plot"));
    if (button.id === "theme") { localStorage.setItem("theme", dark() ? "light" : "dark"); paint(); }
    if (button.id === "copy") navigator.clipboard.writeText(location.href).then(() => { button.textContent = "Copied"; });
  });
})();
