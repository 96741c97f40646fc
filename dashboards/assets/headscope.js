"use strict";
// What happens in the browser: the URL is the state, so a control, a click or a lasso only changes the URL.
(function () {
  const root = document.documentElement;
  const KEPT = ["run", "model", "models", "stat", "base", "pick", "sets"];  // what goes along to another page
  let shown = { values: {}, title: "", path: "" };

  const searched = (changes, kept) => {
    const query = new URLSearchParams(location.search);
    if (kept) [...query.keys()].filter((name) => !kept.includes(name)).forEach((name) => query.delete(name));
    for (const [name, value] of Object.entries(changes)) {
      query.delete(name);
      const told = name === "layers" && value ? [value.join("-")] : [value].flat();
      told.filter((item) => item !== null && item !== undefined && item !== "").forEach((item) => query.append(name, item));
    }
    const text = query.toString();
    return text ? "?" + text : "";
  };
  const go = (pathname, search) => window.dash_clientside.set_props("url", { pathname, search });
  // The URL says more precisely what is shown already: no new page, and no step back in the history.
  const precise = (search) => {
    if (search === location.search) return;
    history.replaceState(history.state, "", location.pathname + search);
    dispatchEvent(new PopStateEvent("popstate"));
  };
  const open = ([layer, head, group]) => go(`/head/${layer}.${head < 0 ? "g" + group : head}`, searched({}, KEPT));
  // Picked heads: shift and a click add one or leave it out, shift and a lasso add.
  let pressed = false;
  addEventListener("mousedown", (event) => { pressed = event.shiftKey; }, true);  // by its answer the key may be up again
  const picked = () => (new URLSearchParams(location.search).get("pick") ?? "").split("_").filter(Boolean);
  const pick = (places) => go(location.pathname, searched({ pick: [...new Set(places)].join("_") }));
  const toggle = ([layer, head]) => {
    const place = `${layer}.${head}`, now = picked();
    pick(now.includes(place) ? now.filter((other) => other !== place) : [...now, place]);
  };
  // The value of the chart that the event came from; the others may hold what happened before.
  const fired = (values) => {
    const context = window.dash_clientside.callback_context;
    const at = context.inputs_list[0].findIndex((input) => input.id.chart === context.triggered_id?.chart);
    return values[at];
  };
  const same = (a, b) => JSON.stringify(a ?? "") === JSON.stringify(b ?? "");

  window.dash_clientside = Object.assign(window.dash_clientside || {}, {
    headscope: {
      // The page says what it shows: title, place in the navigation, values of the controls, its whole address.
      reflect(state) {
        shown = state;
        warn("");
        window.headscopeRest();
        document.title = `${state.title} · headscope`;
        document.querySelectorAll("nav a").forEach((link) =>
          link.getAttribute("href") === state.path ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current"));
        for (const [control, value] of Object.entries(state.values)) window.dash_clientside.set_props({ control }, { value });
        if (state.address === null) return;
        const query = new URLSearchParams(location.search);
        const table = ["sort", "columns"].filter((name) => query.has(name)).map((name) => [name, query.get(name)]);
        const whole = new URLSearchParams(state.address);
        table.forEach(([name, value]) => whole.append(name, value));
        precise("?" + whole);
      },
      steer(values, state) {
        const controls = window.dash_clientside.callback_context.inputs_list[0].map((input) => input.id.control);
        const changed = controls.map((control, at) => [control, values[at]])
          .filter(([control, value]) => control in state.values && !same(value, state.values[control]));
        if (!changed.length) return;
        const changes = Object.fromEntries(changed);
        if ("stat" in changes) Object.assign(changes, { low: "", high: "", sort: "", columns: "" });  // they were of the other one
        if ("run" in changes) Object.assign(changes, { low: "", high: "", layers: "" });
        go(location.pathname, searched(changes));
      },
      open(clicks) {
        const place = fired(clicks)?.points?.[0]?.customdata;
        if (place) pressed && place[1] >= 0 ? toggle(place) : open(place);
      },
      pick(selections) {
        const places = fired(selections)?.points?.map((point) => point.customdata).filter(Boolean);
        if (places) pick([...(pressed ? picked() : []), ...places.map(([layer, head]) => `${layer}.${head}`)]);
      },
      sorted(filters, columns) {
        if (!document.getElementById("grid") || !columns) return;
        const by = columns.find((column) => column.sort);
        const told = filters && Object.keys(filters).length ? JSON.stringify(filters) : "";
        precise(searched({ sort: by ? `${by.colId}-${by.sort}` : "", columns: told }));
      },
      csv: (clicks) => (clicks ? true : window.dash_clientside.no_update),
    },
  });

  window.dashAgGridFunctions = Object.assign(window.dashAgGridFunctions || {}, {
    openHead(event) {
      const clicked = event.type === "cellClicked" && ["layer", "head"].includes(event.colDef.field);
      const place = [event.data.layer, event.data.head];
      if ((clicked && event.event?.shiftKey) || event.event?.key === " ") toggle(place);
      else if (clicked || event.event?.key === "Enter") open(place);
    },
  });

  window.dashAgGridFunctions.openRow = (event) => {
    if (event.data?.href && (event.type === "cellClicked" || event.event?.key === "Enter")) {
      const [pathname, search] = event.data.href.split("?");
      go(pathname, "?" + search);
    }
  };

  // Links inside the app change the URL without loading the app again.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href]:not([download])");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || link.origin !== location.origin) return;
    if (link.getAttribute("href").startsWith("#")) return;
    event.preventDefault();
    go(link.pathname, link.classList.contains("keep") ? searched({}, KEPT) : link.search);
    window.scrollTo(0, 0);
  });

  // From anywhere to a head: L18H6, 18.6.
  document.addEventListener("submit", (event) => {
    if (event.target.id !== "jump-form") return;
    event.preventDefault();
    const box = document.getElementById("jump");
    const place = box.value.trim().match(/^l?(\d+)\s*[.h/,\s]\s*(g?\d+)$/i);
    box.setCustomValidity(place ? "" : "Write a head as L18H6 or 18.6");
    box.reportValidity();
    if (!place) return;
    window.dash_clientside.set_props("jump", { value: "" });
    go(`/head/${Number(place[1])}.${place[2].toLowerCase()}`, searched({}, KEPT));
  });
  document.addEventListener("input", (event) => { if (event.target.id === "jump") event.target.setCustomValidity(""); });

  // A name for the picked heads.
  document.addEventListener("submit", (event) => {
    if (event.target.id !== "set-form") return;
    event.preventDefault();
    const name = document.getElementById("set-name").value.trim().slice(0, 40);
    const sets = new URLSearchParams(location.search).getAll("sets").filter((each) => !each.startsWith(`${name}:`));
    if (name) go(location.pathname, searched({ sets: [...sets, `${name}:${picked().join("_")}`] }));
  });
  // As the influence section of a study has them: headscope run heads.yaml --model ...
  const yaml = () => {
    const written = ([name, places]) => `    ${JSON.stringify(name)}: [${places.map((place) => `L${place.replace(".", "H")}`).join(", ")}]`;
    const sets = new URLSearchParams(location.search).getAll("sets")
      .map((each) => [each.slice(0, each.lastIndexOf(":")), each.slice(each.lastIndexOf(":") + 1).split("_")]);
    const every = picked().length ? [["picked", picked()], ...sets] : sets;
    return [`# ${location.href}`, "influence:", "  heads:", ...every.map(written), ""].join("\n");
  };

  // Arrow keys: on a matrix from head to head, Enter opens; elsewhere on a head's page to the heads beside it.
  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
  const WAYS = { ArrowLeft: "Previous head", ArrowRight: "Next head", ArrowUp: "Next layer", ArrowDown: "Previous layer" };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const chart = event.target.closest?.("[data-matrix]"), plot = chart?.querySelector(".js-plotly-plot");
    if (plot?._fullData) {
      const cells = plot._fullData[0].customdata;
      if (event.key === "Enter" && plot.at) open(cells[plot.at[0]][plot.at[1]]);
      if (!STEPS[event.key]) return;
      event.preventDefault();
      const [row, column] = plot.at ?? [-STEPS[event.key][0], -STEPS[event.key][1]], [up, across] = STEPS[event.key];
      plot.at = [Math.min(Math.max(row + up, 0), cells.length - 1), Math.min(Math.max(column + across, 0), cells[0].length - 1)];
      window.Plotly.Fx.hover(plot, [{ curveNumber: 0, pointNumber: plot.at }]);
      const [layer, head] = cells[plot.at[0]][plot.at[1]], value = plot._fullData[0].z[plot.at[0]][plot.at[1]];
      chart.querySelector("[aria-live]").textContent = `layer ${layer}, head ${head}: ${value?.toPrecision(4) ?? "none"}`;
    } else if (WAYS[event.key] && shown.path === "/head" && !event.target.closest("input, select, textarea, [role=grid], [role=slider], .scroll, aside")) {
      const way = [...document.querySelectorAll("main a")].find((link) => link.textContent === WAYS[event.key]);
      if (way) { event.preventDefault(); way.click(); }
    }
  });

  // A page that cannot be had is told of: what is on screen is what was shown before.
  const warn = (reason) => {
    const banner = document.getElementById("banner");
    if (banner) banner.textContent = reason && `${reason} What you see is still “${shown.title}”.`;
  };
  const fetched = window.fetch;
  let asked = 0;
  const busy = (more) => {
    asked += more;
    document.querySelector(".busy")?.classList.toggle("on", asked > 0);
  };
  window.fetch = async (...request) => {
    const ours = String(request[0]?.url ?? request[0]).includes("_dash-update-component");
    if (ours) busy(1);
    try {
      const response = await fetched(...request);
      if (ours) warn(response.status >= 400 ? `headscope failed to answer (${response.status}); the terminal that runs it says why.` : "");
      return response;
    } catch (error) {
      if (ours && error.name !== "AbortError") warn("headscope does not answer: it was stopped. Start it again with headscope dash, then load this page anew.");
      throw error;
    } finally {
      if (ours) busy(-1);
    }
  };

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

  const name = (plot) => (plot.layout.title.text.replace(/<[^>]*>/g, " ") + " " + (plot.layout.title.subtitle?.text ?? ""))
    .replace(/[^A-Za-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 90).toLowerCase();
  const download = (href, file) => Object.assign(document.createElement("a"), { href, download: file }).click();
  const save = (kind, plot) => {
    if (kind === "csv") download(URL.createObjectURL(new Blob([window.headscopeNumbers(plot)], { type: "text/csv" })), `${name(plot)}.csv`);
    else window.Plotly.downloadImage(plot, { format: kind, filename: name(plot), scale: kind === "png" ? 2 : 1 });
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.save) save(button.dataset.save, button.closest("figure").querySelector(".js-plotly-plot"));
    if (button.id === "set-yaml") download(URL.createObjectURL(new Blob([yaml()], { type: "application/yaml" })), "heads.yaml");
    if (button.id === "theme") { localStorage.setItem("theme", dark() ? "light" : "dark"); paint(); }
    if (button.id === "copy") navigator.clipboard.writeText(location.href).then(() => { button.textContent = "Copied"; });
  });
})();
