"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const declared = new Set(data.declared);
  const byId = (id) => document.getElementById(id);
  const state = { tab: "steps", graph: data.graphs.findIndex(Boolean), step: -1, width: "kernels", query: "", open: new Set() };

  // -- small parts

  /** An element. Texts are always texts: nothing of a model is read as HTML. */
  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
    return element;
  }
  const number = (value) => value.toLocaleString("en");
  const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
  const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole ? 1 : 0)}%` : "–");
  function bytes(value) {
    if (value === null || value === undefined) return "unknown";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (value >= 1024 && power < units.length - 1) [value, power] = [value / 1024, power + 1];
    return `${power && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[power]}`;
  }
  const micros = (value) => (value >= 10000 ? `${(value / 1000).toFixed(1)} ms` : `${value < 100 ? value.toFixed(1) : number(Math.round(value))} µs`);
  const sum = (list) => list.reduce((total, value) => total + value, 0);
  const graph = () => data.graphs[state.graph];
  const letters = (index) => (index < 26 ? String.fromCharCode(65 + index) : letters(Math.floor(index / 26) - 1) + letters(index % 26));
  const kind = (code) => (declared.has(code) ? "declared" : "found");
  const worst = (step) => (step.codes.every((code) => declared.has(code) || code === "small_segment") ? "declared" : "found");
  const chip = (code) => h("span", { class: `chip ${kind(code)}` }, code);
  const stepTime = (step) => (step.time ? step.time[1] ?? step.time[0] : 0);
  const anchor = (step) => (data.graphs.length > 1 ? `#graph-${state.graph + 1}-step-${step}` : `#step-${step}`);
  const stepLink = (step) => h("a", { href: anchor(step) }, `step ${step}`);
  const line = (source) => (source ? [h("div", { class: "where" }, `${source[0]}:${source[1]}`), source[2] ? h("pre", {}, source[2]) : null] : []);
  const remedy = (text) => h("p", { class: "remedy" }, h("b", {}, "To remove it: "), text);

  function links(steps, most = 24) {
    const shown = steps.slice(0, most).map(stepLink);
    return h("div", { class: "links" }, shown, steps.length > most ? h("span", { class: "sub" }, `and ${steps.length - most} more`) : null);
  }
  function table(heads, rows) {
    const cell = (tag, value, index) => h(tag, { class: heads[index][1] || false }, value);
    return h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, heads.map((head, index) => cell("th", head[0], index)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value, index) => cell("td", value ?? "", index)))))));
  }

  // -- head and tabs

  function drawHead() {
    const made = data.graphs.filter(Boolean);
    const total = (name) => sum(made.map((one) => one.counts[name]));
    const forecasts = made.map((one) => one.forecast);
    const tiles = [
      [number(total("segments")), `segments, ${count(new Set(made.flatMap((one) => one.parts)).size, "unit")} to compile`],
      [number(total("breaks")), "breaks"],
      [percent(total("inside"), total("kernels")), `of ${number(total("kernels"))} kernels in segments`],
    ];
    const buckets = sum(made.map((one) => one.buckets.length));
    if (buckets) tiles.push([number(buckets), "buckets"]);
    const live = sum(made.flatMap((one) => one.buckets.map((use) => use[3])));
    if (live) tiles.push([percent(sum(made.flatMap((one) => one.buckets.map((use) => use[4]))), live), "padded over live tokens"]);
    if (made.length && forecasts.every(Boolean)) tiles.push([bytes(sum(forecasts.flat())), "forecast for captures"]);
    const timed = made.flatMap((one) => one.steps.map(stepTime)).filter(Boolean);
    if (timed.length) tiles.push([micros(sum(timed)), "measured in steps"]);
    byId("head").append(
      h("div", { class: "title" }, h("h1", {}, data.label),
        h("div", { class: "about" }, Object.entries(data.about).map(([name, text]) => h("span", {}, `${name} `, h("b", {}, text))))),
      h("div", { class: "tiles" }, tiles.map(([value, name]) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, name)))),
      ...(data.note ? [h("p", { class: "note" }, data.note)] : []));
  }

  const tabs = {
    steps: ["Steps", () => graph() && graph().steps.length, drawSteps],
    breaks: ["Breaks", () => graph() && graph().counts.breaks, drawBreaks],
    memory: ["Buckets and memory", () => (graph() && graph().buckets.length) || null, drawMemory],
    values: ["Inputs", () => graph() && graph().given.length, drawValues],
    passes: ["Passes", () => graph() && graph().passes.filter((one) => one.changes).length, drawPasses],
    outside: ["Not compiled", () => data.uncompiled.length, drawOutside],
  };

  function drawTabs() {
    const bar = byId("tabs");
    bar.replaceChildren(
      ...Object.entries(tabs).map(([name, [title, size]]) => h("button", {
        role: "tab", id: `tab-${name}`, "aria-selected": String(state.tab === name), "aria-controls": "main",
        tabindex: state.tab === name ? 0 : -1, onclick: () => go(name),
      }, title, size() === null || size() === undefined ? null : h("small", { class: name === "outside" && size() ? "alert" : false }, number(size())))),
      h("span", { class: "space" }),
      data.graphs.length > 1 ? h("select", { "aria-label": "Graph", onchange: (event) => { state.graph = Number(event.target.value); state.step = -1; draw(); } },
        data.graphs.map((one, index) => h("option", { value: index, selected: index === state.graph }, `Graph ${index + 1} of ${data.graphs.length}: ${one ? one.summary : "runs unsplit"}`))) : "",
      h("button", { class: "plain", title: "Light or dark", "aria-label": "Light or dark", onclick: turn }, "◐"));
  }
  function go(name) { state.tab = name; draw(); byId(`tab-${name}`).focus(); }
  function turn() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }
  byId("tabs").addEventListener("keydown", (event) => {
    const names = Object.keys(tabs);
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move && event.target.getAttribute("role") === "tab") go(names[(names.indexOf(state.tab) + move + names.length) % names.length]);
  });

  // -- steps

  function drawSteps(main) {
    const one = graph();
    const timed = one.steps.some((step) => step.time);
    if (!timed && state.width === "time") state.width = "kernels";
    const foldable = one.blocks.some((block) => block[2] > 1);
    const all = one.blocks.every((block, index) => block[2] === 1 || state.open.has(index));
    const widths = [["kernels", "kernels"], ["ops", "operations"], ...(timed ? [["time", "measured time"]] : [])];
    const besides = Object.entries(one.other_times).map(([name, [host, device]]) => `${name === "fill" ? "filling slots and bridges" : "copying back"} takes ${micros(device ?? host)} beside them`);
    const about = timed ? [`measured: steps take ${micros(sum(one.steps.map(stepTime)))}; ${[...besides, "that of a segment is shared out over its layers by kernels"].join("; ")}`] : [];
    const lanes = h("div", { id: "lanes", role: "group", "aria-label": "Steps by layer" });
    const panel = h("aside", { class: "card panel", id: "panel", "aria-live": "polite", "aria-label": "The chosen step" });
    main.append(h("div", { class: "columns" },
      h("section", { class: "card" },
        h("div", { class: "head" },
          h("h2", {}, one.summary),
          h("input", { type: "search", placeholder: "find an operation or module", "aria-label": "Find", value: state.query, oninput: (event) => { state.query = event.target.value; mark(); } }),
          h("select", { "aria-label": "Width of segments", onchange: (event) => { state.width = event.target.value; drawLanes(lanes); } },
            widths.map(([value, name]) => h("option", { value, selected: value === state.width }, `width: ${name}`))),
          foldable ? h("button", { class: "plain", onclick: () => { state.open = all ? new Set() : new Set(one.blocks.keys()); draw(); } }, all ? "fold equal layers" : "show every layer") : null),
        h("div", { class: "sub lines" }, [`inputs: ${one.inputs}`, ...one.notes, ...about].map((text) => h("div", {}, text))),
        legend(one), lanes,
        h("p", { class: "hint" }, h("kbd", {}, "←"), " ", h("kbd", {}, "→"), " step  ", h("kbd", {}, "↑"), " ", h("kbd", {}, "↓"), " layer  ", h("kbd", {}, "p"), " ", h("kbd", {}, "n"), " break before, after  ", h("kbd", {}, "Esc"), " none. A pointed end: the segment goes on in the next layer.")),
      panel));
    drawLanes(lanes);
    drawPanel(panel);
  }

  function legend(one) {
    const shown = one.units.slice(0, 8).map((key, index) => h("span", {}, h("i", { style: `background:var(--u${index % 8})` }), `${letters(index)} `, h("code", {}, key)));
    const kinds = new Set(one.steps.filter((step) => step.break).map(worst));
    return h("div", { class: "legend" }, shown,
      one.units.length > 8 ? h("span", {}, `and ${one.units.length - 8} more kinds of segment`) : null,
      kinds.has("declared") ? h("span", {}, h("i", { class: "break declared" }), "break that the code asks for") : null,
      kinds.has("found") ? h("span", {}, h("i", { class: "break found" }), "break that was found") : null);
  }

  function size(piece) {
    const step = graph().steps[piece[0]];
    if (state.width === "ops") return piece[1];
    if (state.width === "time") return step.kernels ? (stepTime(step) * piece[2]) / step.kernels : stepTime(step);
    return piece[2];
  }

  function drawLanes(lanes) {
    const one = graph();
    const widest = Math.max(1, ...one.rows.map((row) => sum(row[1].map(size))));
    const lane = (label, row, times) => h("div", { class: "lane" },
      h("div", { class: "name", title: label }, times ? h("b", { class: "times" }, `× ${times}`) : null, h("span", {}, label)),
      h("div", { class: "track" }, row[1].map((piece) => drawPiece(piece)), h("div", { style: `flex:${Math.max(0.001, widest - sum(row[1].map(size)))} 0 0` })));
    lanes.replaceChildren(...one.blocks.map(([start, period, repeats, labels], index) => {
      if (repeats === 1) return lane(one.rows[start][0], one.rows[start]);
      const open = state.open.has(index);
      const rows = one.rows.slice(start, start + period * (open ? repeats : 1));
      const toggle = h("button", { class: "plain", "aria-expanded": String(open), onclick: () => { open ? state.open.delete(index) : state.open.add(index); drawLanes(lanes); } }, open ? "fold" : "show all");
      return h("div", { class: "fold" },
        h("div", { class: "say" }, toggle, `${count(period * repeats, "layer")}${period > 1 ? `, ${period} and ${period}` : ""} alike`),
        rows.map((row, at) => lane(open ? row[0] : labels[at], row, open ? 0 : repeats)));
    }));
    mark();
  }

  function drawPiece(piece) {
    const [index, ops, kernels, begins, ends] = piece;
    const step = graph().steps[index];
    const title = `step ${index}, ${step.break ? `break: ${step.codes.join(", ") || "no kernel"}, ${step.label}` : `segment ${letters(step.unit)}`}, ${count(kernels, "kernel")}, ${count(ops, "operation")} here${step.time ? `, ${micros(stepTime(step))}` : ""}`;
    const look = step.break ? `break ${worst(step)}` : "segment";
    return h("button", {
      class: `piece ${look}${begins ? "" : " from"}${ends ? "" : " to"}`, "data-step": index, title, "aria-label": title, tabindex: -1,
      style: step.break ? state.width === "time" && `flex:${Math.max(size(piece), 0.001)} 1 auto` : `flex:${Math.max(size(piece), 0.001)} 1 0;background:var(--u${step.unit % 8});color:var(--i${step.unit % 8})`,
      onclick: () => choose(index),
    }, step.break ? [(step.codes[0] || "no kernel") + (step.codes.length > 1 ? ` +${step.codes.length - 1}` : ""), state.width === "time" && step.time ? h("span", {}, micros(stepTime(step))) : null] : [h("b", {}, letters(step.unit)), h("span", {}, state.width === "time" && step.time ? micros(size(piece)) : state.width === "ops" ? ops : kernels)]);
  }

  /** Show which step is chosen and which ones the search finds; one piece is reached by the tabulator key. */
  function mark() {
    const one = graph(), query = state.query.trim().toLowerCase();
    const found = query ? new Set([...one.steps.keys()].filter((index) => textOf(index).includes(query))) : null;
    let first = null;
    for (const element of document.querySelectorAll(".piece")) {
      const index = Number(element.dataset.step);
      element.classList.toggle("chosen", index === state.step);
      element.classList.toggle("faint", found !== null && !found.has(index));
      element.setAttribute("aria-pressed", String(index === state.step));
      element.tabIndex = -1;
      if (first === null || (index === state.step && Number(first.dataset.step) !== index)) first = element;
    }
    if (first !== null) first.tabIndex = 0;
  }
  const texts = new Map();
  function textOf(index) {
    const key = `${state.graph} ${index}`;
    if (!texts.has(key)) {
      const step = graph().steps[index];
      const parts = new Set(step.codes);
      for (const [op, module, source] of step.nodes) {
        parts.add(data.ops[op]).add(data.modules[module]);
        if (data.sources[source]) parts.add(`${data.sources[source][0]}:${data.sources[source][1]} ${data.sources[source][2]}`);
      }
      texts.set(key, [...parts].join("\n").toLowerCase());
    }
    return texts.get(key);
  }

  function choose(index, focus) {
    state.step = index;
    // A layer that is folded away is shown once one of its steps is chosen.
    const one = graph();
    const shown = index < 0 || document.querySelector(`.piece[data-step="${index}"]`);
    if (!shown) one.blocks.forEach(([start, period, repeats], at) => {
      if (repeats > 1 && one.rows.slice(start, start + period * repeats).some((row) => row[1].some((piece) => piece[0] === index))) state.open.add(at);
    });
    history.replaceState(null, "", index < 0 ? location.pathname + location.search : anchor(index));
    if (state.tab !== "steps") { state.tab = "steps"; draw(); }
    else { shown ? mark() : draw(); drawPanel(byId("panel")); }
    const element = document.querySelector(`.piece[data-step="${index}"]`);
    if (element && focus) element.focus({ preventScroll: true });
    if (element) element.scrollIntoView({ block: "nearest" });
  }

  document.addEventListener("keydown", (event) => {
    if (state.tab !== "steps" || !graph() || event.target.closest?.("input, select, [role=tab]") || event.ctrlKey || event.metaKey || event.altKey) return;
    const steps = graph().steps, last = steps.length - 1, at = state.step;
    const breaks = [...steps.keys()].filter((index) => steps[index].break);
    const target = {
      ArrowRight: () => Math.min(last, at + 1), ArrowLeft: () => Math.max(0, at - 1),
      ArrowDown: () => layerAway(1), ArrowUp: () => layerAway(-1),
      n: () => breaks.find((index) => index > at) ?? at, p: () => breaks.findLast((index) => index < at) ?? at,
      Escape: () => -1,
    }[event.key];
    if (!target) return;
    event.preventDefault();
    choose(target(), true);
  });
  /** The step at the same place of the layer below or above. */
  function layerAway(by) {
    const rows = graph().rows;
    const here = rows.findIndex((row) => row[1].some((piece) => piece[0] === state.step && (piece[3] || row === rows[0])));
    if (here < 0) return 0;
    const position = rows[here][1].findIndex((piece) => piece[0] === state.step);
    const there = rows[Math.min(rows.length - 1, Math.max(0, here + by))][1];
    return there[Math.min(position, there.length - 1)][0];
  }

  // -- the panel

  function drawPanel(panel) {
    const one = graph(), index = state.step, step = one.steps[index];
    if (!step) {
      panel.replaceChildren(h("h2", {}, one.breaks.length ? "What stands between the segments" : "One segment, no breaks"),
        h("p", { class: "sub" }, "Choose a segment or a break to see why it is one, the lines it comes from, its operations, values and bytes."),
        ...one.breaks.map((found) => h("div", { class: `reason ${kind(found.code)}` },
          h("p", {}, chip(found.code), ` ${count(found.times, "operation")}: ${data.meanings[found.code][0]}`),
          found.remedies.map(remedy), links([...new Set(found.texts.flatMap((text) => text[1].flatMap((place) => place[2])))], 6))));
      return;
    }
    const alike = [...one.steps.keys()].filter((other) => one.steps[other].look === step.look && other !== index);
    const walk = (to, text, label) => h("button", { class: "plain", "aria-label": label, title: label, disabled: to < 0 || to >= one.steps.length, onclick: () => choose(to) }, text);
    const total = (ordinals) => { const known = ordinals.map((ordinal) => one.values[ordinal][5]); return known.includes(null) ? null : sum(known); };
    const passing = (ordinals) => ordinals.filter((ordinal) => one.values[ordinal][2] !== "static" && one.values[ordinal][2] !== "constant");
    const facts = [
      ["kernels", number(step.kernels)], ["operations", number(step.nodes.length)],
      ["read", bytes(total(passing(step.inputs)))], ["given", bytes(total(step.outputs))],
      ["peak of allocations", bytes(step.peak)],
    ];
    if (step.unit >= 0) facts.push(["unit", `${letters(step.unit)} ${one.units[step.unit]}`]);
    if (step.parts.length) facts.push(["compiled in", count(step.parts.length, "part")]);
    if (step.fixed) facts.push(["done once, at capture", count(step.fixed, "operation")]);
    if (step.time) facts.push(["on the host", micros(step.time[0])]);
    if (step.time && step.time[1] !== null) facts.push(["on the device", micros(step.time[1])]);
    const sizes = Object.entries(one.sizes).map(([name, value]) => `${name} = ${number(value)}`).join(", ");
    panel.replaceChildren(
      h("div", { class: "head" }, h("h2", { id: `step-${index}-panel` }, `Step ${index}: ${step.break ? "break" : "segment"} `, step.break ? step.codes.map(chip) : null),
        h("div", { class: "walk" }, walk(index - 1, "←", "step before"), walk(index + 1, "→", "step after"))),
      h("p", { class: "where" }, step.span),
      alike.length ? h("details", {}, h("summary", {}, `${count(alike.length, "other step")} like it`), links(alike, 80)) : "",
      h("h3", {}, "Numbers"), h("dl", { class: "numbers" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      sizes ? h("p", { class: "sub" }, `Bytes for ${sizes}.`) : "",
      h("h3", {}, step.break ? "Why it is a break" : "Why it is here"), ...drawReasons(step),
      ...drawOrdinals("Reads", step.inputs), ...drawOrdinals("Gives", step.outputs),
      ...step.tails.map(([node, value]) => h("p", { class: "sub" }, `The padded rows of ${value} are cleared behind %${node}.`)),
      h("h3", {}, "Operations"), ...drawOps(step), ...drawAllocations(step));
    panel.scrollTop = 0;
  }

  function drawReasons(step) {
    const shown = step.reasons.filter((reason) => step.break || reason[0] !== "capturable");
    if (!shown.length) return [h("p", {}, step.break ? "It launches no kernel: nothing of it is worth a graph." : "Everything in it can be captured."), ...(step.break ? [] : line(data.sources[step.nodes[0][2]]))];
    return shown.map(([code, text, op, module, source, fix]) => h("div", { class: `reason ${step.break ? kind(code) : ""}` },
      h("p", {}, chip(code), " ", data.meanings[code] ? data.meanings[code][0] : ""),
      h("p", {}, text), h("p", { class: "sub mono" }, `${data.ops[op]}${data.modules[module] ? ` in ${data.modules[module]}` : ""}`),
      line(data.sources[source]), step.break && fix ? remedy(fix) : null));
  }

  function drawOrdinals(title, ordinals) {
    if (!ordinals.length) return [];
    const one = graph();
    const held = (ordinal) => ["static", "constant"].includes(one.values[ordinal][2]);
    const rows = (list) => table([["value"], ["shape"], ["bytes", "num"]], list.map((ordinal) => {
      const [name, argument, kindOf, role, spec, size] = one.values[ordinal];
      return [[argument && kindOf !== "static" ? `${name} (${argument})` : name, role ? h("div", { class: "sub" }, role) : null], spec, size === 0 ? "" : bytes(size)];
    }));
    const own = ordinals.filter((ordinal) => !held(ordinal)), others = ordinals.filter(held);
    return [h("h3", {}, title), own.length ? rows(own) : "",
      others.length ? h("details", {}, h("summary", {}, `${count(others.length, "tensor")} of the model, ${bytes(sum(others.map((ordinal) => one.values[ordinal][5] || 0)))}`), rows(others)) : ""];
  }

  function drawOps(step) {
    const groups = [];
    for (const node of step.nodes) {
      if (!groups.length || groups.at(-1)[0] !== node[1]) groups.push([node[1], []]);
      groups.at(-1)[1].push(node);
    }
    const body = groups.map(([module, nodes]) => [
      h("div", { class: "module" }, data.modules[module] || "the model itself"),
      nodes.map(([op, , source, kernels, ordinal]) => h("div", { class: `op${kernels ? "" : " no"}`, title: data.sources[source] ? `${data.sources[source][0]}:${data.sources[source][1]}\n${data.sources[source][2]}` : "" },
        h("span", {}, `%${ordinal} ${data.ops[op]}`), h("em", {}, [data.sources[source] ? `${data.sources[source][0].split("/").pop()}:${data.sources[source][1]}` : "", kernels > 1 ? ` ×${kernels}` : ""].join("")))),
    ]);
    return step.nodes.length <= 12 ? body.flat(2) : [h("details", {}, h("summary", {}, `${count(step.nodes.length, "operation")} in ${count(groups.length, "group")}, faint where no kernel is launched`), body)];
  }

  function drawAllocations(step) {
    if (!step.allocations.length) return [];
    const one = graph(), most = 16;
    const rows = step.allocations.map(([text, born, dies, freed]) => [one.texts[text], born, dies, freed]).sort((a, b) => (b[0][1] ?? 0) - (a[0][1] ?? 0));
    const name = (position) => { const node = step.nodes[position]; return `%${node[4]} ${data.ops[node[0]]}`; };
    const until = (dies, freed) => (dies >= 0 ? name(dies) : freed >= 0 ? `step ${freed}` : "the end of the call");
    return [h("h3", {}, "Allocations"), h("details", {}, h("summary", {}, `${count(rows.length, "storage")}, the largest first`),
      table([["bytes", "num"], ["size"], ["from"], ["until"]], rows.slice(0, most).map(([[text, size], born, dies, freed]) => [bytes(size), text, name(born), until(dies, freed)])),
      rows.length > most ? h("p", { class: "sub" }, `and ${rows.length - most} smaller ones`) : "")];
  }

  // -- the other tabs

  function drawBreaks(main) {
    const one = graph();
    if (!one.breaks.length) { main.append(h("p", { class: "card" }, "No breaks: the whole graph is one segment.")); return; }
    for (const found of one.breaks) main.append(h("section", { class: "card" },
      h("div", { class: "head" }, h("h2", {}, chip(found.code), ` ${data.meanings[found.code][0]}`), h("span", { class: "sub" }, `${count(found.times, "operation")} in ${count(found.steps, "break")}; the only reason of ${number(found.alone)}`)),
      found.remedies.map(remedy),
      found.texts.map(([text, places]) => h("div", { class: `reason ${kind(found.code)}` }, h("p", {}, text),
        places.map(([source, modules, steps]) => h("div", { style: "margin-top:6px" }, line(data.sources[source]), h("p", { class: "sub mono" }, `in ${modules}`), links(steps)))))));
  }

  function drawMemory(main) {
    const one = graph(), names = ["slots", "bridges", "segments", "reserves of breaks"];
    const bar = (parts, whole) => h("div", { class: "bar" }, parts.map((part, index) => h("i", { class: `c${index}`, title: `${names[index]} ${bytes(part)}`, style: `width:${whole ? (100 * part) / whole : 0}%` })));
    const legendOf = h("div", { class: "legend" }, names.map((name, index) => h("span", {}, h("i", { class: `c${index}` }), one.forecast ? `${name} ${bytes(one.forecast[index])}` : name)));
    main.append(h("section", { class: "card" }, h("h2", {}, one.forecast ? `Captures are forecast to take ${bytes(sum(one.forecast))}` : "What captures take depends on sizes that are not known here"),
      h("p", { class: "sub" }, one.buckets.length ? "All buckets together: they share one pool, slots and bridges, the largest captured first." : Object.keys(one.sizes).length ? `For ${Object.entries(one.sizes).map(([name, value]) => `${name} = ${value}`).join(", ")}.` : "For one exact shape."),
      one.forecast ? [bar(one.forecast, sum(one.forecast)), legendOf] : null));
    if (one.unpadded) main.append(h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, h("span", { class: "chip found" }, one.unpadded.code), " not padded, exact shapes are captured: ", one.unpadded.meaning[0])),
      h("div", { class: "reason found" }, h("p", {}, one.unpadded.text), one.unpadded.sources.map((source) => line(data.sources[source]))), h("p", { class: "remedy" }, h("b", {}, "To change it: "), one.unpadded.meaning[1])));
    if (!one.buckets.length) return;
    const prompts = sum(one.buckets.map((use) => use[2])), live = sum(one.buckets.map((use) => use[3])), padded = sum(one.buckets.map((use) => use[4]));
    const biggest = Math.max(...one.buckets.map((use) => (use[1] ? sum(use[1]) : 0))), busiest = Math.max(1, ...one.buckets.map((use) => use[3] + use[4]));
    const heads = [["bucket", "num"], ...(prompts ? [["prompts", "num"], ["padded over live", "num"], ["tokens: live, padded"]] : []), ["by itself", "num"], ["slots, bridges, segments"]];
    main.append(h("section", { class: "card" }, h("h2", {}, count(one.buckets.length, "bucket")),
      h("p", { class: "sub" }, prompts ? `${count(prompts, "prompt")}, ${number(padded)} padded tokens over ${number(live)} live ones: ${percent(padded, live)}.${one.above ? ` ${count(one.above, "prompt")} above the last bucket run eagerly.` : ""}` : "No prompt lengths were given, so padding is not counted."),
      table(heads, one.buckets.map(([rows, forecast, uses, tokens, pads]) => [number(rows),
        ...(prompts ? [number(uses), uses ? percent(pads, tokens) : "", h("div", { class: "bar" }, h("i", { class: "c0", title: `${number(tokens)} live`, style: `width:${(100 * tokens) / busiest}%` }), h("i", { class: "c2", title: `${number(pads)} padded`, style: `width:${(100 * pads) / busiest}%` }))] : []),
        forecast ? bytes(sum(forecast)) : "unknown", forecast ? bar(forecast, biggest) : ""]))));
  }

  function drawValues(main) {
    const one = graph();
    const rows = (ordinals) => table([["name"], ["argument"], ["kind"], ["in memory"], ["shape"], ["bytes", "num"]], ordinals.map((ordinal) => { const [name, argument, kindOf, role, spec, size] = one.values[ordinal]; return [h("code", {}, name), argument, kindOf, role, h("code", {}, spec), size === 0 ? "" : bytes(size)]; }));
    const held = one.given.filter((ordinal) => one.values[ordinal][2] === "static"), own = one.given.filter((ordinal) => one.values[ordinal][2] !== "static");
    main.append(h("section", { class: "card" }, h("h2", {}, "What a call gives"), own.length ? rows(own) : h("p", { class: "empty" }, "Nothing.")),
      h("section", { class: "card" }, h("details", {}, h("summary", {}, `${count(held.length, "tensor")} of the model, ${bytes(sum(held.map((ordinal) => one.values[ordinal][5] || 0)))}`), rows(held))));
  }

  function drawPasses(main) {
    const lines = (diff) => h("pre", { class: "diff" }, diff.map(([sign, text]) => h("div", { class: { "+": "add", "-": "del", "@": "gap" }[sign] || false }, sign === "@" ? `… ${text}` : `${sign} ${text}`)));
    main.append(h("section", { class: "card" }, h("h2", {}, "Passes in the order they ran"), table([["pass", "narrow"], ["changes", "num"], ["what it says, and what it changed"]], graph().passes.map((one) => [
      h("code", {}, one.name), h("span", { class: one.changes ? "" : "empty" }, number(one.changes)),
      [one.notes.map((note) => h("p", {}, note)), one.diff.length ? h("details", { open: one.diff.length < 40 }, h("summary", {}, `${count(one.diff.filter((part) => part[0] === "+" || part[0] === "-").length, "line")} changed${/ more lines$/.test(one.diff.at(-1)[1]) ? ", and more that are not shown" : ""}`), lines(one.diff)) : null],
    ]))));
  }

  function drawOutside(main) {
    if (!data.uncompiled.length) { main.append(h("p", { class: "card" }, "Dynamo compiled the whole model: no graph breaks of its own, no recompile limit.")); return; }
    main.append(h("section", { class: "card" }, h("h2", {}, "What Dynamo left to plain Python: no plan knows of it"),
      data.uncompiled.map(([text, places]) => h("div", { class: "reason found" }, h("p", {}, text), places.map((place) => h("div", { class: "where" }, place))))));
  }

  // -- all of it

  function draw() {
    drawTabs();
    const main = byId("main");
    main.replaceChildren();
    main.setAttribute("role", "tabpanel");
    main.setAttribute("aria-labelledby", `tab-${state.tab}`);
    if (!graph() && state.tab !== "outside") main.append(h("p", { class: "card" }, data.graphs.length ? "This graph runs unsplit." : "Nothing was compiled: Dynamo found no graph in the model."));
    else tabs[state.tab][2](main);
  }
  function read() {
    const found = /^#(?:graph-(\d+)-)?step-(\d+)$/.exec(location.hash);
    if (found) {
      const wanted = Number(found[1] || 0) - 1;
      if (wanted >= 0 && data.graphs[wanted]) state.graph = wanted;
      if (graph() && graph().steps[Number(found[2])]) { state.tab = "steps"; state.step = -1; draw(); choose(Number(found[2])); return; }
    }
    const tab = location.hash.slice(1);
    if (tabs[tab]) state.tab = tab;
    draw();
  }
  drawHead();
  window.addEventListener("hashchange", read);
  read();
})();
