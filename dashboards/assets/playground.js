"use strict";
// The playground: the attention pattern of a head on a canvas, linked with the tokens of the prompt.
(function () {
  const SMALLEST_WEIGHT = 1e-4;  // lower end of the logarithmic colours
  const MIN_LABEL_CELL = 11, FONT = 11, MAX_SIZE = 560, MIN_SIZE = 400, SPACE_AROUND = 460;
  let picture = null, head = 0, isLog = true;
  let cell = null, lockedQuery = null;  // cell: [query, key]; key is null if only a query token is chosen
  const byId = (id) => document.getElementById(id);
  const setProps = (id, props) => window.dash_clientside.set_props(id, props);

  const decode = ({ shape: [heads, length], weights, tokens, model, layer }) => {
    const bytes = Uint8Array.from(atob(weights), (character) => character.charCodeAt(0));
    return { heads, length, tokens, model, layer, weights: new Float32Array(bytes.buffer) };
  };
  const weight = (query, key, ofHead = head) => picture.weights[(ofHead * picture.length + query) * picture.length + key];
  const colourTable = () => {
    const stops = byId("attention-picture").dataset.colours.split(" ").map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
    return (share) => {
      const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
      return stops[low].map((value, channel) => Math.round(value + (place - low) * (stops[low + 1][channel] - value)));
    };
  };
  const shareOf = (value) => (isLog ? 1 - Math.log(Math.max(value, SMALLEST_WEIGHT)) / Math.log(SMALLEST_WEIGHT) : value);

  // The pattern of one head, a pixel per cell; keys after the query stay transparent.
  const patternImage = (ofHead, colour) => {
    const { length } = picture, canvas = new OffscreenCanvas(length, length), context = canvas.getContext("2d");
    const image = context.createImageData(length, length);
    for (let query = 0; query < length; query++) for (let key = 0; key <= query; key++) {
      image.data.set([...colour(shareOf(weight(query, key, ofHead))), 255], 4 * (query * length + key));
    }
    context.putImageData(image, 0, 0);
    return canvas;
  };

  let image = null, layout = null;
  const shorten = (text) => (text.length > 13 ? `${text.slice(0, 12)}…` : text);
  const draw = () => {
    const canvas = byId("attention-canvas"), frame = byId("attention-picture");
    if (!picture || !canvas || !frame.clientWidth) return;
    const { length, tokens } = picture, style = getComputedStyle(document.documentElement);
    const context = canvas.getContext("2d"), font = `${FONT}px system-ui, "DejaVu Sans", sans-serif`;
    context.font = font;
    const labelWidth = 12 + Math.max(...tokens.map((token) => context.measureText(shorten(token)).width));
    const total = Math.min(frame.clientWidth, MAX_SIZE, Math.max(innerHeight - SPACE_AROUND, MIN_SIZE));
    const isLabelled = (total - labelWidth) / length >= MIN_LABEL_CELL;
    const margin = isLabelled ? labelWidth : 20, size = total - margin, step = size / length, ratio = devicePixelRatio || 1;
    layout = { margin, step };
    Object.assign(canvas, { width: total * ratio, height: total * ratio });
    Object.assign(canvas.style, { width: `${total}px`, height: `${total}px` });
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = false;
    context.drawImage(image, margin, 0, size, size);
    context.font = font;
    context.textBaseline = "middle";
    const write = (text, isCurrent) => { context.fillStyle = style.getPropertyValue(isCurrent ? "--ink" : "--soft"); context.fillText(text, 0, 0); };
    const place = (x, y, angle, align, text, isCurrent) => {
      context.save();
      context.translate(x, y);
      context.rotate(angle);
      context.textAlign = align;
      write(text, isCurrent);
      context.restore();
    };
    if (isLabelled) tokens.forEach((token, position) => {
      const middle = (position + 0.5) * step;
      place(margin - 6, middle, 0, "right", shorten(token), cell?.[0] === position);
      place(margin + middle, size + 6, Math.PI / 2, "left", shorten(token), cell?.[1] === position);
    });
    else {
      place(8, size / 2, -Math.PI / 2, "center", "query token");
      place(margin + size / 2, size + 11, 0, "center", "key token");
    }
    if (!cell) return;
    const [query, key] = cell, outline = (x, y, width, height) => {
      for (const [colour, thickness] of [["#000", 3], ["#fff", 1.5]]) {
        Object.assign(context, { strokeStyle: colour, lineWidth: thickness });
        context.strokeRect(x, y, width, height);
      }
    };
    outline(margin, query * step, (query + 1) * step, step);
    if (key !== null) outline(margin + key * step, query * step, step, step);
  };

  const number = (value) => (value >= 0.001 ? value.toFixed(3) : value.toExponential(1));
  const nameOf = (position) => `“${picture.tokens[position].trim()}” (${position})`;
  const describe = () => {
    const readout = byId("attention-readout");
    if (!readout || !picture) return;
    if (!cell) { readout.textContent = "Point at a cell or a token; a click locks the query token, Esc releases it; then click an earlier token to compare all heads."; return; }
    const [query, key] = cell, keys = [...Array(query + 1).keys()].sort((a, b) => weight(query, b) - weight(query, a));
    const top = keys.slice(0, 3).map((position) => `${nameOf(position)} ${number(weight(query, position))}`).join(", ");
    const pair = key === null ? "" : `Weight on ${nameOf(key)}: ${number(weight(query, key))}. `;
    readout.textContent = `Query ${nameOf(query)}${lockedQuery === null ? "" : ", locked"}. ${pair}Top keys: ${top}.`;
  };
  // The tokens show the weights of the chosen query, else their losses.
  const shadeTokens = () => {
    const legend = byId("token-legend"), spans = [...document.querySelectorAll("#playground-tokens [data-token]")];
    if (!legend || (picture && spans.length !== picture.length)) return;
    legend.dataset.text ??= legend.textContent;
    legend.textContent = cell ? `Shade: weights of L${picture.layer}H${head} for the query ${nameOf(cell[0])}.` : legend.dataset.text;
    for (const span of spans) {
      const position = Number(span.dataset.token);
      const shade = cell && position <= cell[0] ? `${(100 * Math.sqrt(weight(cell[0], position))).toFixed(1)}%` : "0%";
      span.style.setProperty("--shade", cell ? shade : span.dataset.lossShade);
      span.classList.toggle("marked", cell?.[0] === position);
    }
  };
  const show = (next) => {
    if (!picture) return;
    cell = next;
    draw();
    describe();
    shadeTokens();
  };
  const release = () => { lockedQuery = null; show(null); };
  const lock = (query, key) => { lockedQuery = lockedQuery === query ? null : query; show([query, key]); };
  // A query token and a key token: every head's weight from one to the other is drawn below.
  const choosePair = (query, key) => {
    lockedQuery = query;
    show([query, key]);
    setProps("playground-pair", { data: { query, key } });
    setProps("playground-quantity", { value: "pair" });
  };

  const drawHeads = (colour) => {
    const container = byId("attention-heads");
    container.replaceChildren(...Array.from({ length: picture.heads }, (_, index) => {
      const button = Object.assign(document.createElement("button"), { type: "button", title: `L${picture.layer}H${index}` });
      const canvas = Object.assign(document.createElement("canvas"), { width: picture.length, height: picture.length });
      canvas.getContext("2d").drawImage(patternImage(index, colour), 0, 0);
      button.dataset.showsHead = index;
      button.setAttribute("aria-pressed", String(index === head));
      button.append(canvas, `H${index}`);
      return button;
    }));
  };
  const drawScale = (colour) => {
    const stops = Array.from({ length: 11 }, (_, index) => `rgb(${colour(index / 10).join()})`).join(", ");
    const bar = Object.assign(document.createElement("span"), { className: "colour-bar" });
    bar.style.background = `linear-gradient(to right, ${stops})`;
    byId("attention-scale").replaceChildren(isLog ? "weight ≤ 0.0001 " : "weight 0 ", bar, " 1");
  };

  let drawn = null, lastStep = null, body = null;  // the data that the thumbnails show, its request, and the element
  window.dash_clientside = Object.assign(window.dash_clientside || {}, {
    playground: {
      drawAttention(data, chosenHead, scale) {
        const { no_update } = window.dash_clientside;
        if (!data) return no_update;
        if (byId("attention-body") !== body) [body, picture, lastStep] = [byId("attention-body"), null, null];  // the page was opened anew
        const isNew = data !== drawn, { picture: encoded, ...step } = data;
        const isNewStep = JSON.stringify(step) !== JSON.stringify(lastStep);
        [lastStep, drawn] = [step, data];
        body.hidden = !encoded;
        if (isNew) {
          const before = picture?.tokens.join("\n");
          picture = encoded ? decode(encoded) : null;
          if (picture?.tokens.join("\n") !== before) lockedQuery = cell = null;  // another prompt
        }
        if (!picture) { shadeTokens(); return isNewStep ? step : no_update; }
        const hasNewScale = isLog !== (scale === "log");
        [isLog, head] = [scale === "log", Math.min(Number(chosenHead), picture.heads - 1)];
        const colour = colourTable();
        image = patternImage(head, colour);
        if (isNew || hasNewScale) drawHeads(colour);
        document.querySelectorAll("[data-shows-head]").forEach((button) => button.setAttribute("aria-pressed", String(Number(button.dataset.showsHead) === head)));
        byId("attention-title").textContent = `Attention of L${picture.layer}H${head}: ${picture.model}`;
        drawScale(colour);
        show(cell);
        return isNewStep ? step : no_update;
      },
      // The results of an earlier prompt are marked; its attention pattern disappears with them.
      markOutdated(prompt, data) {
        const context = window.dash_clientside.callback_context, isOutdated = Boolean(data) && data.request.prompt !== prompt;
        if (context.triggered.some(({ prop_id }) => prop_id === "playground-prediction.data")) byId("attention-body").hidden = true;
        byId("playground-results").classList.toggle("outdated", isOutdated);
        return !isOutdated;
      },
      // A link to the page keeps what is shown: inputs of the last run, and the choices.
      keepView(data, model, layer, chosenHead, quantity, scale, nextToken, pair, corrupted, answer, wrong) {
        if (!data || location.pathname !== "/playground") return;  // the reader may have left the page
        const { prompt, heads, kind } = data.request;
        const view = { prompt, heads: heads.map(([l, h]) => `L${l}H${h}`).join(", "), kind, count: data.count, model, layer, head: chosenHead, quantity, scale,
          next_token: nextToken, ...(pair ? { pair } : {}), ...(quantity === "patching" ? { corrupted, answer, wrong } : {}) };
        window.headscopeKeepInUrl({ playground: JSON.stringify(view) });
      },
      insertHeads: (heads) => heads || window.dash_clientside.no_update,
    },
  });

  // Clicks on a head matrix of this page choose a head; with shift they add it to the ablated heads, or remove it.
  window.headscopeChooseHead = ([layer, chosenHead]) => {
    if (!byId("playground-results")) return false;
    setProps("playground-head", { value: String(chosenHead) });
    setProps("playground-layer", { value: String(layer) });
    return true;
  };
  window.headscopeTickHead = ([layer, chosenHead]) => {
    const input = byId("playground-heads");
    if (!input) return false;
    const name = `L${layer}H${chosenHead}`, heads = input.value.split(/[\s,;_]+/).filter(Boolean);
    setProps("playground-heads", { value: (heads.includes(name) ? heads.filter((other) => other !== name) : [...heads, name]).join(", ") });
    return true;
  };

  const cellAt = (event) => {
    const bounds = byId("attention-canvas").getBoundingClientRect();
    const key = Math.floor((event.clientX - bounds.left - layout.margin) / layout.step), query = Math.floor((event.clientY - bounds.top) / layout.step);
    const isInside = picture && query >= 0 && query < picture.length && key >= 0 && key < picture.length;
    return isInside ? [query, key <= query ? key : null] : null;
  };
  const tokenOf = (event) => event.target.closest?.("#playground-tokens [data-token]");
  document.addEventListener("mousemove", (event) => {
    if (!picture || !layout) return;
    if (event.target.id === "attention-canvas") {
      const at = cellAt(event);
      if (lockedQuery === null) show(at);
      else if (at) show([lockedQuery, at[1] !== null || at[0] <= lockedQuery ? Math.min(cellAt(event)[1] ?? lockedQuery, lockedQuery) : null]);
    } else if (lockedQuery === null && tokenOf(event)) show([Number(tokenOf(event).dataset.token), null]);
    else if (lockedQuery === null && cell && !byId("attention-picture")?.contains(document.activeElement)) show(null);
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-shows-head]");
    if (button) setProps("playground-head", { value: button.dataset.showsHead });
    if (!picture) return;
    if (tokenOf(event)) {
      const position = Number(tokenOf(event).dataset.token);
      lockedQuery !== null && position < lockedQuery ? choosePair(lockedQuery, position) : lock(position, null);
    }
    if (event.target.id !== "attention-canvas") return;
    const at = cellAt(event);
    if (at && lockedQuery === null) lock(...at);
    else if (at && cell && cell[1] !== null && cell[1] < lockedQuery) choosePair(...cell);  // the cell that is framed
  });
  // On this page the selected heads go into the box of ablated heads; elsewhere the link opens the page.
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[data-ablates]");
    if (!link || !byId("playground-heads") || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    setProps("playground-heads", { value: link.dataset.ablates });
  }, true);
  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target.id === "playground-prompt") byId("playground-run").click();
    if (!picture || !byId("attention-picture")) return;
    if (event.key === "Escape") release();
    if (document.activeElement?.id !== "attention-picture" || event.ctrlKey || event.metaKey || event.altKey) return;
    const [query, key] = cell ?? [picture.length - 1, picture.length - 1];
    if (event.key === "Enter") lock(query, key);
    if (!STEPS[event.key]) return;
    event.preventDefault();
    const [down, right] = STEPS[event.key], limit = (value, end) => Math.min(Math.max(value, 0), end);
    const nextQuery = lockedQuery ?? limit(query + (cell ? down : 0), picture.length - 1);
    show([nextQuery, limit((key ?? nextQuery) + (cell ? right : 0), nextQuery)]);
  });
  addEventListener("resize", draw);
  new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-mantine-color-scheme"] });
})();
