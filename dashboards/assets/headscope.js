"use strict";
// The browser's part of the app. The URL is the state: controls, clicks and lassos only change the URL.
(function () {
  const root = document.documentElement;
  const BROWSER_PARAMETERS = ["sort", "column_filters", "playground"];  // parameters that the server never changes
  const PERSISTENT_PARAMETERS = ["run", "model", "models", "stat", "baseline", "heads", "sets"];  // parameters that links to other pages keep
  let page = { control_values: {}, title: "", nav_path: "", pathname: "", models: [], file_suffix: "" };

  let requested = null;  // pathname and query that the URL is about to have
  const newestQuery = () => new URLSearchParams((requested ?? location).search);
  const changedQuery = (changes, keep) => {
    const query = newestQuery();
    if (keep) [...query.keys()].filter((name) => !keep.includes(name)).forEach((name) => query.delete(name));
    for (const [name, value] of Object.entries(changes)) {
      query.delete(name);
      const items = name === "layers" && value ? [value.join("-")] : [value].flat();
      items.filter((item) => item !== null && item !== undefined && item !== "").forEach((item) => query.append(name, item));
    }
    const text = query.toString();
    return text ? "?" + text : "";
  };
  const go = (pathname, search) => {
    leavePage();
    requested = pathname + search === viewAddress() ? null : { pathname, search };
    window.dash_clientside.set_props("url", { pathname, search });
  };
  // Until the URL is that of a page: no time limit, as a busy browser runs timers late.
  const { pushState } = history;
  history.pushState = (...entry) => {
    pushState.apply(history, entry);
    requested = null;
  };
  addEventListener("popstate", (event) => { if (event.isTrusted) requested = null; });
  // Replaces the URL by one for the same view: no new page, and no entry in the history.
  const replaceQuery = (search) => {
    const isLeaving = requested && requested.pathname !== location.pathname;
    if (isLeaving || search === location.search) return;
    if (requested) requested.search = search;
    history.replaceState(history.state, "", location.pathname + search);
    dispatchEvent(new PopStateEvent("popstate"));
  };
  // The query of a link that the server wrote for the page on screen, with what the reader has changed since:
  // a choice whose page has not arrived yet, and what only the browser keeps.
  const rebase = (pathname, search) => {
    if (!page.query_string) return search;
    const [linked, shown, current, result] = [search, page.query_string, newestQuery(), ""].map((text) => new URLSearchParams(text));
    const isHere = pathname === (requested ?? location).pathname;
    for (const name of new Set([...linked.keys(), ...current.keys()])) {
      const values = linked.getAll(name), isKept = isEqual(values, shown.getAll(name)) || (BROWSER_PARAMETERS.includes(name) && !linked.has(name));
      const isCurrent = isKept && (isHere || PERSISTENT_PARAMETERS.includes(name));
      (isCurrent ? current.getAll(name) : values).forEach((value) => result.append(name, value));
    }
    return "?" + result;
  };
  window.headscopeFollow = (href) => {
    const { pathname, search } = new URL(href, location.href);
    go(pathname, rebase(pathname, search));
  };
  window.headscopeKeepInUrl = (changes) => replaceQuery(changedQuery(changes));
  const goToHead = ([layer, head, group], model) => window.headscopeChooseHead?.([layer, head]) ||
    go(`/head/${layer}.${head < 0 ? "g" + group : head}`, changedQuery(model ? { model } : {}, PERSISTENT_PARAMETERS));
  // The model that a trace of a chart shows: charts hold labels as plotly text, escaped and wrapped.
  const decoder = document.createElement("textarea");
  const withoutSpace = (text) => String(text ?? "").replace(/\s+/g, "");
  const plainLabel = (text) => { decoder.innerHTML = String(text ?? "").replace(/<br>/g, ""); return withoutSpace(decoder.value); };
  const modelOf = (plot, trace) => [trace?.meta, trace?.name, plot?.layout?.meta?.model].filter((name) => typeof name === "string")
    .map((name) => page.models.find((model) => withoutSpace(model) === plainLabel(name))).find(Boolean);
  // Selected heads: shift-click adds or removes one, a lasso with shift adds.
  let shiftPressed = false;
  addEventListener("mousedown", (event) => { shiftPressed = event.shiftKey; }, true);  // the key may be up when the click is handled
  const selectedHeads = () => (newestQuery().get("heads") ?? "").split("_").filter(Boolean);
  const select = (heads) => {
    restoring++;
    tableScroll = tableViewport()?.scrollTop ?? 0;
    tableCell = document.activeElement?.closest("#head-table .ag-cell") ?? null;
    go(location.pathname, changedQuery({ heads: [...new Set(heads)].join("_") }));
  };
  // A selection builds the table of heads anew: its rows stay where they are, until the reader scrolls, and the keyboard
  // stays in its cell.
  let tableScroll = 0, tableCell = null;  // the focused cell of the table that is replaced
  const tableApi = () => window.dash_ag_grid.getApi("head-table");
  const tableViewport = () => document.querySelector("#head-table .ag-body-viewport");
  let restoring = 0;  // which restoration is the newest: an earlier one stops
  const restoreTable = (turn = ++restoring, frames = 180) => {  // frames, not seconds: a busy browser draws late
    if (turn !== restoring) return;
    const viewport = tableViewport(), isLost = document.activeElement === document.body;
    if (!(tableScroll || tableCell) || !frames) { tableScroll = 0; tableCell = null; return; }
    if (viewport && tableScroll && viewport.scrollTop !== tableScroll) viewport.scrollTop = tableScroll;
    if (viewport?.querySelector(".ag-row") && isLost && tableCell) {
      tableApi().setFocusedCell(Number(tableCell.parentElement.getAttribute("row-index")), tableCell.getAttribute("col-id"));
    }
    requestAnimationFrame(() => restoreTable(turn, frames - 1));
  };
  const toggle = ([layer, head]) => {
    if (window.headscopeTickHead?.([layer, head])) return;
    const name = `${layer}.${head}`, selected = selectedHeads();
    select(selected.includes(name) ? selected.filter((other) => other !== name) : [...selected, name]);
  };
  // The chart that was clicked, and the points; a callback may also be triggered by charts that have just been drawn.
  const triggeredChart = () => {
    const { prop_id, value } = window.dash_clientside.callback_context.triggered.filter((chart) => chart.value?.points?.length).at(-1) ?? {};
    return value ? { chart: JSON.parse(prop_id.slice(0, prop_id.lastIndexOf("."))).chart, points: value.points } : null;
  };
  const isEqual = (a, b) => JSON.stringify(a ?? "") === JSON.stringify(b ?? "");
  // Whether the page is that of the URL, apart from what only the browser keeps.
  const isOfUrl = ({ pathname, requested_query }) => {
    const url = requested ?? location, queries = [requested_query, url.search].map((text) => new URLSearchParams(text));
    BROWSER_PARAMETERS.forEach((name) => queries.forEach((query) => query.delete(name)));
    return pathname === url.pathname && queries[0].toString() === queries[1].toString();
  };
  const followedValues = {};  // by control: the last value that the URL followed, or that the page set
  // What an older page built anew: the boxes of the table of heads. What it left: the control of runs.
  const showNewestChoices = () => {
    if (document.getElementById("head-table")) window.dash_clientside.set_props("head-table", { selectedRows: { ids: selectedHeads() } });
    const runs = newestQuery().getAll("run");
    if (!runs.length) return;
    followedValues.run = runs;
    window.dash_clientside.set_props({ control: "run" }, { value: runs });
  };

  // Tabs lead to their first page with data; pages that the run has no data for are grey and name the command that stores it.
  const showNavigation = ({ nav_path, navigation: { group, first_paths, missing } }) => {
    document.querySelectorAll("nav [data-group]").forEach((row) => { row.hidden = row.dataset.group !== group; });
    const hasRow = document.querySelector("nav [data-group]:not([hidden])") !== null;
    document.querySelectorAll("header nav a").forEach((link) => {
      const isTab = "tab" in link.dataset;
      if (isTab && first_paths[link.dataset.tab]) link.setAttribute("href", first_paths[link.dataset.tab]);
      const path = link.getAttribute("href"), isCurrent = isTab ? link.dataset.tab === group : path === nav_path;
      if (isCurrent) link.setAttribute("aria-current", isTab && hasRow ? "true" : "page");
      else link.removeAttribute("aria-current");
      link.classList.toggle("missing", path in missing);
      if (path in missing) link.title = `Not in this run. To add it: ${missing[path]}`;
      else link.removeAttribute("title");
    });
  };

  window.dash_clientside = Object.assign(window.dash_clientside || {}, {
    headscope: {
      // Shows the state of the page: title, navigation, values of the controls, and the complete URL.
      showState(state) {
        page = state;
        address = viewAddress();
        leaving = "";
        warn("");
        window.headscopeLoadDeferred();
        restoreTable();
        document.title = `${state.title} · headscope`;
        showNavigation(state);
        newest.name ? showNewestRun() : poll();
        if (state.query_string === null) return;
        if (!isOfUrl(state)) return showNewestChoices();  // the page of a later choice is on its way
        const values = Object.fromEntries(window.dash_clientside.callback_context.states_list[0].map(({ id, value }) => [id.control, value]));
        for (const [control, value] of Object.entries(state.control_values)) {
          const isChosen = control in values && control in followedValues && !isEqual(values[control], followedValues[control]);
          if (isChosen && !isEqual(values[control], value)) continue;  // `changeControls` has yet to follow the choice
          const placeholder = control in state.placeholders ? { placeholder: state.placeholders[control] } : {};
          followedValues[control] = value;
          const isSet = control in values && isEqual(values[control], value) && !("placeholder" in placeholder);
          if (!isSet) window.dash_clientside.set_props({ control }, { value, ...placeholder });
        }
        const query = new URLSearchParams(location.search);
        const table = BROWSER_PARAMETERS.filter((name) => query.has(name)).map((name) => [name, query.get(name)]);
        const complete = new URLSearchParams(state.query_string);
        table.forEach(([name, value]) => complete.append(name, value));
        replaceQuery("?" + complete);
      },
      changeControls(values, state) {
        const controls = window.dash_clientside.callback_context.inputs_list[0].map((input) => input.id.control);
        const isFollowed = (control, value) => control in followedValues && isEqual(value, followedValues[control]);
        const changed = controls.map((control, index) => [control, values[index]]).filter(([control, value]) =>
          control in state.control_values && !isEqual(value, state.control_values[control]) && !isFollowed(control, value));
        controls.forEach((control, index) => { followedValues[control] = values[index]; });
        if (!changed.length) return;
        const changes = Object.fromEntries(changed);
        // Bounds and filters belong to the previous statistic or run.
        if ("stat" in changes) Object.assign(changes, { min: "", max: "", sort: "", column_filters: "" });
        if ("run" in changes) Object.assign(changes, { min: "", max: "", layers: "" });
        go(location.pathname, changedQuery(changes));
      },
      openHead() {
        const clicked = triggeredChart(), point = clicked?.points[0], head = point?.customdata;
        if (!head) return;
        const plot = [...document.querySelectorAll("main .dash-graph")].find((graph) => graph.id.includes(`"chart":"${clicked.chart}"`))
          ?.querySelector(".js-plotly-plot");
        shiftPressed && head[1] >= 0 ? toggle(head) : goToHead(head, modelOf(plot, plot?.data[point.curveNumber]));
      },
      selectHeads() {
        const heads = triggeredChart()?.points.map((point) => point.customdata).filter(Boolean);
        if (heads) select([...(shiftPressed ? selectedHeads() : []), ...heads.map(([layer, head]) => `${layer}.${head}`)]);
      },
      storeTableState(filters, columns) {
        const isLeft = page.pathname !== location.pathname;  // the table that reports is that of the page on screen
        if (!document.getElementById("head-table") || !columns || isLeft) return;
        const sorted = columns.find((column) => column.sort);
        const text = filters && Object.keys(filters).length ? JSON.stringify(filters) : "";
        replaceQuery(changedQuery({ sort: sorted ? `${sorted.colId}-${sorted.sort}` : "", column_filters: text }));
      },
      exportTable: (clicks) => (clicks ? true : window.dash_clientside.no_update),
    },
  });

  window.dashAgGridFunctions = Object.assign(window.dashAgGridFunctions || {}, {
    openHeadCell(event) {
      const isClicked = event.type === "cellClicked" && ["layer", "head"].includes(event.colDef.field);
      const head = [event.data.layer, event.data.head];
      const isSpace = event.event?.key === " " && event.event.target.type !== "checkbox";  // a box changes by itself
      if ((isClicked && event.event?.shiftKey) || isSpace) toggle(head);
      else if (isClicked || event.event?.key === "Enter") goToHead(head);
    },
    // The cell of the head under the pointer is framed in every matrix.
    hoverHeadRow(event) {
      document.querySelectorAll("[data-head-matrix]").forEach((chart) => {
        const plot = chart.querySelector(".js-plotly-plot"), cells = plot?._fullData?.[0]?.customdata;
        if (!cells?.[0]?.[0]?.length) return;
        const { layer, head } = event.data, isHead = (cell) => cell?.[0] === layer && cell?.[1] === head;
        const row = event.type === "cellMouseOut" ? -1 : Array.from(cells).findIndex((line) => Array.from(line).some(isHead));
        row < 0 ? hideCursor(chart) : showCursor(chart, plot, row, Array.from(cells[row]).findIndex(isHead));
      });
    },
    openRecord(event) {
      if (event.data?.href && (event.type === "cellClicked" || event.event?.key === "Enter")) {
        const [pathname, search] = event.data.href.split("?");
        go(pathname, "?" + search);
      }
    },
  });

  // Boxes of the table of heads. A click changes the selection of the URL, whatever the box shows: a page that was on its
  // way builds the table anew, for a moment with the boxes of an older selection.
  let lastTicked = null;
  const shownRows = () => {
    const rows = [];
    tableApi().forEachNodeAfterFilterAndSort(({ id }) => rows.push(id));
    return rows;
  };
  const tick = (rows, isTicked) => {
    const others = selectedHeads().filter((name) => !rows.includes(name));
    select(isTicked ? [...others, ...rows] : others);
  };
  const tickAll = () => {
    const rows = shownRows(), selected = selectedHeads();
    tick(rows, !rows.every((name) => selected.includes(name)));
  };
  document.addEventListener("click", (event) => {
    if (event.target.type !== "checkbox") return;
    const box = event.target, name = box.closest(".ag-selection-checkbox")?.closest("#head-table .ag-row")?.getAttribute("row-id");
    if (box.closest("#head-table .ag-header-select-all")) tickAll();
    if (!name) return;
    const rows = event.shiftKey ? shownRows() : [], ends = [lastTicked, name].map((end) => rows.indexOf(end)).sort((a, b) => a - b);
    ends[0] >= 0 ? tick(rows.slice(ends[0], ends[1] + 1), true) : toggle(name.split("."));
    lastTicked = name;
  }, true);
  document.addEventListener("keydown", (event) => {
    const isAll = event.key.toLowerCase() === "a" && (event.ctrlKey || event.metaKey) && event.target.closest("#head-table .ag-row");
    const isHeader = event.key === " " && event.target.matches("#head-table .ag-header-cell:has(.ag-header-select-all)");
    if (isAll || isHeader) tickAll();
  }, true);

  // Links inside the app change the URL without reloading the app.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href]:not([download])");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || link.origin !== location.origin) return;
    if (link.getAttribute("href").startsWith("#")) return;
    event.preventDefault();
    if (link.classList.contains("keep-state")) go(link.pathname, changedQuery({}, PERSISTENT_PARAMETERS));
    else window.headscopeFollow(link.href);
    window.scrollTo(0, 0);
  });

  // Back and Forward restore the scroll position, once the page is long enough.
  const scrollPositions = new Map();
  const viewAddress = () => location.pathname + location.search;
  let address = viewAddress(), target = null, leaving = "";
  function leavePage() {
    scrollPositions.set(viewAddress(), scrollY);
    leaving = viewAddress();  // what scrolls now is the next page
  }
  history.scrollRestoration = "manual";
  addEventListener("scroll", () => { if (target === null && viewAddress() !== leaving) scrollPositions.set(viewAddress(), scrollY); }, { passive: true });
  for (const event of ["wheel", "touchstart", "keydown", "mousedown"]) addEventListener(event, () => { target = null; tableScroll = 0; if (event !== "keydown") tableCell = null; }, { passive: true, capture: true });
  addEventListener("popstate", (event) => {
    if (!event.isTrusted || viewAddress() === address) return;
    target = scrollPositions.get(viewAddress()) ?? 0;
    const started = performance.now();
    const restore = () => {
      if (target === null) return;
      window.scrollTo(0, target);
      if (Math.abs(scrollY - target) < 2 && page.pathname === location.pathname || performance.now() - started > 8000) target = null;
      else requestAnimationFrame(restore);
    };
    requestAnimationFrame(restore);
  });

  // The box that goes to a head: L18H6, 18.6.
  document.addEventListener("submit", (event) => {
    if (event.target.id !== "go-to-head-form") return;
    event.preventDefault();
    const box = document.getElementById("go-to-head");
    const match = box.value.trim().match(/^l?(?:ayer)?\s*(\d+)\s*[.,/\s]?\s*(?:h|head)?\s*(g?\d+)$/i)
      ?? box.value.trim().match(/^l?(?:ayer)?\s*(\d+)\s*[.,/\s]?\s*(?:kv\s*)?group\s*(\d+)$/i);
    const isGroup = /group/i.test(box.value), isSplit = /\D/.test(box.value.trim().replace(/^l(ayer)?/i, "").trim());
    box.setCustomValidity(match && isSplit ? "" : "Write a head as L18H6, 18.6 or layer 18 head 6");
    box.reportValidity();
    if (!match || !isSplit) return;
    window.dash_clientside.set_props("go-to-head", { value: "" });
    go(`/head/${Number(match[1])}.${isGroup ? "g" : ""}${match[2].toLowerCase()}`, changedQuery({}, PERSISTENT_PARAMETERS));
  });
  document.addEventListener("input", (event) => { if (event.target.id === "go-to-head") event.target.setCustomValidity(""); });

  // Saves the selected heads as a named set.
  document.addEventListener("submit", (event) => {
    if (event.target.id !== "head-set-form") return;
    event.preventDefault();
    const name = document.getElementById("head-set-name").value.trim().slice(0, 40);
    const sets = newestQuery().getAll("sets").filter((entry) => !entry.startsWith(`${name}:`));
    if (name) go(location.pathname, changedQuery({ sets: [...sets, `${name}:${selectedHeads().join("_")}`] }));
  });
  // The sets as a study file of the influence probe: headscope run heads.yaml --model ...
  const studyYaml = () => {
    const line = ([name, heads]) => `    ${JSON.stringify(name)}: [${heads.map((head) => `L${head.replace(".", "H")}`).join(", ")}]`;
    const sets = newestQuery().getAll("sets")
      .map((entry) => [entry.slice(0, entry.lastIndexOf(":")), entry.slice(entry.lastIndexOf(":") + 1).split("_")]);
    const entries = selectedHeads().length ? [["selected", selectedHeads()], ...sets] : sets;
    return [`# ${location.href}`, "influence:", "  heads:", ...entries.map(line), ""].join("\n");
  };

  // Keyboard on a matrix of heads: arrow keys move a cursor from head to head, Enter opens.
  const hideCursor = (chart) => chart.querySelector(".cell-cursor")?.remove();
  const showCursor = (chart, plot, row, column) => {
    hideCursor(chart);
    const { xaxis, yaxis } = plot._fullLayout, trace = plot._fullData[0];
    const ends = (axis, place) => [axis.c2p(place - 0.5), axis.c2p(place + 0.5)].sort((a, b) => a - b).map((pixel) => pixel + axis._offset);
    const [left, right] = ends(xaxis, trace.x[column]), [top, bottom] = ends(yaxis, trace.y[row]);
    const cursor = Object.assign(document.createElement("div"), { className: "cell-cursor" });
    Object.assign(cursor.style, { left: `${left}px`, top: `${top}px`, width: `${right - left}px`, height: `${bottom - top}px` });
    plot.append(cursor);
  };
  document.addEventListener("focusout", (event) => {
    const chart = event.target.closest?.("[data-head-matrix]"), plot = chart?.querySelector(".js-plotly-plot");
    if (plot?._fullData) { hideCursor(chart); window.Plotly.Fx.unhover(plot); }
  });
  // The row of the head under the pointer is marked in the table of heads.
  window.headscopeMarkRow = (head) => {
    document.querySelectorAll("#head-table .linked-row").forEach((row) => row.classList.remove("linked-row"));
    const api = document.getElementById("head-table") && window.dash_ag_grid?.getApi?.("head-table");
    const name = head && `${head[0]}.${head[1]}`, node = api && head && api.getRowNode(name);
    if (!node) return;
    api.ensureNodeVisible(node);
    requestAnimationFrame(() => document.querySelectorAll(`#head-table .ag-row[row-id="${name}"]`).forEach((row) => row.classList.add("linked-row")));
  };
  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const chart = event.target.closest?.("[data-head-matrix]"), plot = chart?.querySelector(".js-plotly-plot");
    if (!plot?._fullData) return;
    const cells = plot._fullData[0].customdata;
    if (event.key === "Enter" && plot.currentCell) goToHead(cells[plot.currentCell[0]][plot.currentCell[1]], modelOf(plot, plot.data[0]));
    if (!STEPS[event.key]) return;
    event.preventDefault();
    const [up, across] = STEPS[event.key], [row, column] = plot.currentCell ?? [-up, -across];
    const limit = (index, count) => Math.min(Math.max(index, 0), count - 1);
    plot.currentCell = [limit(row + up, cells.length), limit(column + across, cells[0].length)];
    const [i, j] = plot.currentCell, trace = plot._fullData[0];
    window.Plotly.Fx.hover(plot, { xval: trace.x[j], yval: trace.y[i] }, [`${trace.xaxis}${trace.yaxis}`]);
    const [layer, head] = cells[i][j], meta = plot.layout.meta ?? {};
    showCursor(chart, plot, i, j);
    const value = meta.value_index === undefined ? plot._fullData[0].z[i][j] : cells[i][j][meta.value_index];  // colours may be logarithms
    const text = Number.isFinite(value) ? String(Number(value.toPrecision(4))) : "not measured";
    chart.querySelector("[aria-live]").textContent = `layer ${layer}, head ${head}: ${meta.value ? `${meta.value} ` : ""}${text}`;
  });

  // A banner if a page cannot be loaded: the previous page stays on screen.
  const warn = (reason) => {
    const banner = document.getElementById("banner");
    if (banner) banner.textContent = reason && `${reason} This page is still “${page.title}”.`;
  };
  const originalFetch = window.fetch;
  let openRequests = 0;
  const countRequest = (change) => {
    openRequests += change;
    document.querySelector(".progress-bar")?.classList.toggle("active", openRequests > 0);
  };
  window.fetch = async (...request) => {
    const isUpdate = String(request[0]?.url ?? request[0]).includes("_dash-update-component");
    if (isUpdate) countRequest(1);
    try {
      const response = await originalFetch(...request);
      if (isUpdate) warn(response.status >= 400 ? `headscope failed to answer (${response.status}). See the terminal that runs it.` : "");
      return response;
    } catch (error) {
      if (isUpdate && error.name !== "AbortError") warn("headscope does not answer. Start headscope dash again, then reload this page.");
      throw error;
    } finally {
      if (isUpdate) countRequest(-1);
    }
  };

  // New runs appear by themselves: in an empty app the page is loaded again, else a note below the controls offers the run.
  const POLL_INTERVAL = 5000;
  let newest = {};
  const showNewestRun = () => {
    const isOffered = Boolean(newest.name) && !new URLSearchParams(location.search).getAll("run").includes(newest.name);
    const href = isOffered ? location.pathname + changedQuery({ run: newest.name }, ["models", "model", "stat"]) : "/";
    window.dash_clientside.set_props("newer-run-link", { href, children: newest.label ?? "" });
    window.dash_clientside.set_props("newer-run", { hidden: !isOffered });
  };
  const offerNewRun = (answer) => {
    if (!answer.name || answer.name === newest.name) return;
    const { name } = newest = answer;
    if (page.query_string === null && location.search === "" && sessionStorage.getItem("loaded-for") !== name) {
      sessionStorage.setItem("loaded-for", name);
      return location.reload();
    }
    showNewestRun();
  };
  const poll = window.headscopePoll = () => {
    if (document.hidden) return;
    if (document.getElementById("run-progress")) {
      originalFetch("/run-progress").then((response) => (response.ok ? response.json() : null)).then((sentences) => {
        if (sentences) window.dash_clientside.set_props("run-progress", { children: sentences.join("\n") || "No run is unfinished." });
      }).catch(() => {});
    }
    originalFetch("/newest-run").then((response) => (response.ok ? response.json() : {})).then(offerNewRun).catch(() => {});
  };
  setInterval(poll, POLL_INTERVAL);

  // Light or dark: the system's setting, until the button overrides it.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (localStorage.getItem("theme") ?? (system.matches ? "dark" : "light")) === "dark";
  const applyTheme = () => {
    root.dataset.mantineColorScheme = root.dataset.agThemeMode = isDark() ? "dark" : "light";
  };
  new MutationObserver(() => { if ((root.dataset.mantineColorScheme === "dark") !== isDark()) applyTheme(); })
    .observe(root, { attributeFilter: ["data-mantine-color-scheme"] });
  system.addEventListener("change", applyTheme);
  applyTheme();

  // A chart's file is named by its title, which states its model, and by the runs and filters of the page.
  const fileName = (plot) => [`${plot.layout.title.text.replace(/<[^>]*>/g, " ")} ${plot.layout.title.subtitle?.text ?? ""}`, page.file_suffix]
    .map((text) => text.replace(/[^A-Za-z0-9.]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 110).toLowerCase()).filter(Boolean).join("-");
  const download = (href, file) => Object.assign(document.createElement("a"), { href, download: file }).click();
  const downloadText = (text, type, file) => download(URL.createObjectURL(new Blob([text], { type })), file);
  const exportChart = (kind, plot) => {
    if (kind === "csv") downloadText(window.headscopeChartCsv(plot), "text/csv", `${fileName(plot)}.csv`);
    else window.Plotly.downloadImage(plot, { format: kind, filename: fileName(plot), scale: kind === "png" ? 2 : 1 });
  };
  const copyText = (button, text) => navigator.clipboard.writeText(text).then(() => "Copied", () => "The browser blocked copying").then((result) => {
    button.dataset.label ??= button.textContent;
    button.textContent = result;
    setTimeout(() => { button.textContent = button.dataset.label; }, 2000);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.export) exportChart(button.dataset.export, button.closest("figure").querySelector(".js-plotly-plot"));
    if (button.id === "head-set-yaml") downloadText(studyYaml(), "application/yaml", "heads.yaml");
    if (button.id === "theme-toggle") { localStorage.setItem("theme", isDark() ? "light" : "dark"); applyTheme(); }
    if (button.dataset.copyText) copyText(button, button.dataset.copyText);
    if (button.id === "copy-link") copyText(button, location.href);
    if (button.id === "copy-python") copyText(button, page.python);
    if ("copyPython" in button.dataset) copyText(button, `${page.python}view.figures[${JSON.stringify(button.dataset.copyPython)}].show()\n`);
  });
})();
