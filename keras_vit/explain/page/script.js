"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const [ROWS, COLUMNS] = data.grid;
const PATCHES = ROWS * COLUMNS;
// The color map viridis at 33 places, between which it is nearly straight.
const VIRIDIS = (
  "440154470d6048186a482374472d7b4537814240863e49893b528b375b8d33638d2f6b8e2c728e297a8e26828e23898e" +
  "21918c1f988b1fa08822a78528ae8032b67a3fbc734ec36b5ec96270cf5784d44b98d83eaddc30c2df23d8e219ece51b" +
  "fde725"
).match(/.{6}/g);
const COLORS = Array.from({ length: 256 }, (_, level) => {
  const place = (level / 255) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  return [0, 2, 4].map((at) => {
    const [a, b] = [0, 1].map((step) => parseInt(VIRIDIS[low + step].slice(at, at + 2), 16));
    return Math.round(a + (place - low) * (b - a));
  });
});
const SVG = "http://www.w3.org/2000/svg";

const find = (id) => document.getElementById(id);
const percent = (share) => (100 * share).toPrecision(share < 0.1 ? 2 : 3) + " %";
let strength = 0.65;
const overlays = []; // functions that redraw an image with a map

function bytes(text) {
  const letters = atob(text);
  const values = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) values[i] = letters.charCodeAt(i);
  return values;
}

const floats = (text) => new Float32Array(bytes(text).buffer);

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// -- images with maps

const image = new Image();

/** As wide as the page allows, but not higher than the screen. */
function fit(canvas) {
  const width = `min(100%, ${((28 * canvas.width) / canvas.height).toFixed(3)}rem)`;
  canvas.style.width = width;
  const scale = canvas.nextElementSibling;
  if (scale.className === "scale") scale.style.width = width;
}

/** Gives a canvas the image's size; returns its context. */
function canvasOf(id) {
  const canvas = find(id);
  const [width, height] = data.image.shown;
  const times = Math.max(1, Math.ceil(640 / Math.max(width, height)));
  [canvas.width, canvas.height] = [width * times, height * times];
  fit(canvas);
  return canvas.getContext("2d");
}

/** What the model sees, in pixels of a canvas: left, top, width, height. */
function seen(canvas) {
  const [left, top, width, height] = data.image.seen;
  return [left * canvas.width, top * canvas.height, width * canvas.width, height * canvas.height];
}

/** The grid as a canvas with one pixel per patch; `levels` has one or three bytes per patch. */
function gridCanvas(levels, rows = ROWS, columns = COLUMNS) {
  const canvas = element("canvas", { width: columns, height: rows });
  paint(canvas, levels);
  return canvas;
}

function paint(canvas, levels) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const count = canvas.width * canvas.height;
  const colored = levels.length === 3 * count;
  for (let i = 0; i < count; i++) {
    const color = colored ? levels.subarray(3 * i, 3 * i + 3) : COLORS[levels[i]];
    image.data.set([color[0], color[1], color[2], 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
}

function drawImage(context, gray) {
  const { canvas } = context;
  context.save();
  context.imageSmoothingEnabled = !data.image.small;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  if (gray) {
    context.globalCompositeOperation = "saturation";
    context.fillStyle = "hsl(0, 0%, 50%)";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.globalCompositeOperation = "source-over";
    context.fillStyle = "rgba(0, 0, 0, 0.4)"; // on white, every color of a map would look pale
    context.fillRect(0, 0, canvas.width, canvas.height);
  }
  context.restore();
  const [left, top, width, height] = seen(canvas);
  context.fillStyle = "rgba(0, 0, 0, 0.6)";
  context.beginPath();
  context.rect(0, 0, canvas.width, canvas.height);
  context.rect(left, top, width, height);
  context.fill("evenodd"); // around what the model sees
}

/** The image in gray under a map, and a frame around a patch if one is given. */
function drawMap(context, levels, { patch = null, alpha = strength } = {}) {
  const area = seen(context.canvas);
  drawImage(context, true);
  context.save();
  context.imageSmoothingEnabled = false;
  context.globalAlpha = alpha;
  context.drawImage(gridCanvas(levels), ...area);
  context.restore();
  if (patch === null) return;
  const [width, height] = [area[2] / COLUMNS, area[3] / ROWS];
  const line = Math.max(3, context.canvas.width / 160);
  for (const [color, thick] of [["#000", 2 * line], ["#fff", line]]) {
    context.strokeStyle = color;
    context.lineWidth = thick;
    context.strokeRect(
      area[0] + (patch % COLUMNS) * width, area[1] + Math.floor(patch / COLUMNS) * height,
      width, height,
    );
  }
}

/** Calls back with the patch that is clicked on a canvas. */
function onPatch(canvas, call) {
  canvas.classList.add("clickable");
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const [left, top, width, height] = data.image.seen;
    const x = ((event.clientX - box.left) / box.width - left) / width;
    const y = ((event.clientY - box.top) / box.height - top) / height;
    if (x < 0 || x >= 1 || y < 0 || y >= 1) return;
    call(Math.floor(y * ROWS) * COLUMNS + Math.floor(x * COLUMNS));
  });
}

/** Two number fields for a patch: calls back when they change; returns a function to set them. */
function placeFields(rowId, columnId, call) {
  const fields = [[find(rowId), ROWS], [find(columnId), COLUMNS]];
  for (const [field, size] of fields) {
    field.max = size - 1;
    field.addEventListener("input", () => {
      const [row, column] = fields.map(([{ valueAsNumber: value }, most]) =>
        Number.isNaN(value) ? 0 : Math.min(Math.max(Math.trunc(value), 0), most - 1));
      call(row * COLUMNS + column);
    });
    field.addEventListener("blur", () => call(null)); // shows the current patch
  }
  return (patch) => {
    const values = [Math.floor(patch / COLUMNS), patch % COLUMNS];
    fields.forEach(([field], i) => {
      if (field !== document.activeElement) field.value = values[i];
    });
  };
}

function radio(group, value, text, checked, call) {
  const input = element("input", { type: "radio", name: group, value, checked });
  input.addEventListener("change", () => call(value));
  return element("label", {}, input, element("span", { textContent: text }));
}

// -- the sections

function showImage() {
  const [width, height] = data.image.size;
  find("model").textContent = data.model;
  drawImage(canvasOf("image"), false);
  find("image").setAttribute("aria-label", "The image");
  const [, , wide, high] = data.image.seen;
  const whole = wide > 0.999 && high > 0.999;
  find("image-caption").textContent =
    `${width} × ${height} pixels` + (whole ? "." : "; the model sees the bright part.");
  if (data.prediction === null) return;
  find("answer").hidden = false;
  for (const { label, score } of data.prediction) {
    const bar = element("i");
    bar.style.width = 100 * Math.min(Math.max(score, 0), 1) + "%";
    const texts = [label, score.toFixed(4)].map((text) => element("span", { textContent: text }));
    find("classes").append(element("li", {}, bar, ...texts));
  }
}

function showAttention() {
  const { layers, heads, queries, whole } = data.attention;
  const levels = bytes(data.attention.levels);
  const peaks = floats(data.attention.peaks);
  const sums = floats(data.attention.sums);
  const context = canvasOf("attention-map");
  const pooled = ["mean_all", "map_all"].includes(data.pooling)
    ? "mean of all tokens" : "mean of the patches";
  const fixed = data.classToken ? "class token" : pooled;
  const chosen = {
    layer: layers - 1,
    head: "mean",
    query: !whole || (data.classToken && /^token/.test(data.pooling)) ? "0" : "patches",
    patch: Math.floor(ROWS / 2) * COLUMNS + Math.floor(COLUMNS / 2),
  };

  /** Which rows of attention are averaged for the chosen query. */
  function queryRows() {
    if (!whole) return [0];
    if (chosen.query === "patch") return [data.prefix + chosen.patch];
    if (chosen.query !== "patches") return [Number(chosen.query)];
    return Array.from({ length: PATCHES }, (_, i) => data.prefix + i);
  }

  /** The mean over heads and queries: what goes to each patch, and how much to all of them. */
  function drawn(someHeads) {
    const weights = new Float32Array(PATCHES);
    const rows = queryRows();
    const share = 1 / (someHeads.length * rows.length);
    let sum = 0;
    for (const head of someHeads) {
      for (const row of rows) {
        const at = (chosen.layer * heads + head) * queries + row;
        const unit = (share * peaks[at]) / 255;
        for (let i = 0; i < PATCHES; i++) weights[i] += unit * levels[at * PATCHES + i];
        sum += share * sums[at];
      }
    }
    const peak = weights.reduce((a, b) => Math.max(a, b), 0);
    return { weights, sum, peak, levels: weights.map((w) => Math.round((255 * w) / (peak || 1))) };
  }

  const every = Array.from({ length: heads }, (_, i) => i);
  const tiles = [["mean", every], ...every.map((head) => [String(head), [head]])].map(
    ([value, some]) => {
      const canvas = element("canvas", { width: COLUMNS, height: ROWS });
      const label = radio("head", value, value, value === chosen.head, (head) => {
        chosen.head = head;
        draw();
      });
      label.insertBefore(canvas, label.lastChild);
      label.firstChild.setAttribute("aria-label", value === "mean" ? "mean" : "head " + value);
      find("heads").append(label);
      return { value, some, canvas };
    },
  );

  function queryName() {
    if (!whole) return fixed;
    if (chosen.query === "patches") return "mean of the patches";
    if (chosen.query === "patch") {
      return `patch in row ${Math.floor(chosen.patch / COLUMNS)}, column ${chosen.patch % COLUMNS}`;
    }
    return prefixNames()[Number(chosen.query)];
  }

  function draw() {
    const found = drawn(chosen.head === "mean" ? every : [Number(chosen.head)]);
    const marked = whole && chosen.query === "patch" ? chosen.patch : null;
    drawMap(context, found.levels, { patch: marked });
    const head = chosen.head === "mean" ? "mean of the heads" : "head " + chosen.head;
    const name = queryName();
    const other = percent(Math.max(0, 1 - found.sum));
    const text =
      `Layer ${chosen.layer}, ${head}, ${name}: ${percent(found.peak)} of the attention is on the ` +
      (data.prefix ? `brightest patch, ${other} on tokens that are not patches.` : "brightest patch.");
    find("attention-caption").textContent = text;
    context.canvas.setAttribute("aria-label", text);
    find("attention-peak").textContent = percent(found.peak);
  }

  function drawAll() {
    find("layer-value").textContent = `${chosen.layer} (0 to ${layers - 1})`;
    for (const { some, canvas } of tiles) paint(canvas, drawn(some).levels);
    draw();
  }

  const layer = find("layer");
  layer.max = layers - 1;
  layer.value = chosen.layer;
  layer.addEventListener("input", () => {
    chosen.layer = Number(layer.value);
    drawAll();
  });
  if (whole) {
    const setFields = placeFields("query-row", "query-column", choosePatch);
    function chooseQuery(query) {
      chosen.query = query;
      document.querySelector(`input[name="query"][value="${query}"]`).checked = true;
      drawAll();
    }
    function choosePatch(patch) {
      if (patch !== null) {
        chosen.patch = patch;
        chooseQuery("patch");
      }
      setFields(chosen.patch);
    }
    const named = prefixNames().map((name, i) => [String(i), name]);
    named.push(["patches", "mean of the patches"], ["patch", "one patch:"]);
    for (const [value, name] of named) {
      find("query-tokens").append(radio("query", value, name, value === chosen.query, chooseQuery));
    }
    setFields(chosen.patch);
    onPatch(context.canvas, choosePatch);
  } else {
    find("queries").hidden = true;
    find("attention-note").hidden = false;
    find("attention-note").textContent =
      `Attention between all tokens of this model takes more than ${data.attention.limit} MB. The ` +
      `page holds the attention of the ${fixed} to each patch.`;
  }
  overlays.push(draw);
  drawAll();
}

function prefixNames() {
  const front = data.classToken ? ["class token"] : [];
  if (data.distillationToken) front.push("distillation token");
  const registers = data.prefix - front.length;
  return [...front, ...Array.from({ length: registers }, (_, i) => `register ${i}`)];
}

function showEvidence() {
  const rollout = bytes(data.rollout.levels);
  const rolloutContext = canvasOf("rollout");
  find("rollout-peak").textContent = percent(data.rollout.peak);
  rolloutContext.canvas.setAttribute("aria-label", "Attention rollout over the image");
  overlays.push(() => drawMap(rolloutContext, rollout));
  if (data.poolingMap !== null) {
    find("pooling-panel").hidden = false;
    const levels = bytes(data.poolingMap.levels);
    const context = canvasOf("pooling");
    find("pooling-peak").textContent = percent(data.poolingMap.peak);
    context.canvas.setAttribute("aria-label", "Attention of the pooling over the image");
    overlays.push(() => drawMap(context, levels));
  }
  if (data.gradients !== null) showGradients();
}

function showGradients() {
  let index = 0;
  const panels = [
    ["grad-cam", "Grad-CAM", data.gradients.gradCam],
    ["attention-gradient", "Attention times gradient", data.gradients.attentionGradient],
  ].map(([id, name, maps]) => {
    find(id + "-panel").hidden = false;
    const read = maps.map((map) => ({ ...map, levels: bytes(map.levels) }));
    return { id, name, context: canvasOf(id), maps: read };
  });
  function draw() {
    for (const { id, name, context, maps } of panels) {
      drawMap(context, maps[index].levels);
      find(id + "-none").hidden = maps[index].peak > 0;
      const { label } = data.prediction[index];
      context.canvas.setAttribute("aria-label", `${name} of ${label} over the image`);
    }
  }
  find("explained").hidden = false;
  data.prediction.forEach(({ label }, i) => {
    find("explained-classes").append(
      radio("class", String(i), label, i === 0, (value) => {
        index = Number(value);
        draw();
      }),
    );
  });
  overlays.push(draw);
}

/** A chart with a dot per head: values by layer and head. */
function chart(id, values, unit, most = null) {
  const [width, height, left, right, top, bottom] = [400, 260, 46, 10, 12, 40];
  const svg = find(id);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const high = Math.max(...values.flat(), most ?? 0) || 1;
  const step = [1, 2, 2.5, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(high / 4)))
    .find((n) => n >= high / 5);
  const end = step * Math.ceil(high / step - 1e-9);
  const x = (layer) => left + ((layer + 0.5) / values.length) * (width - left - right);
  const y = (value) => height - bottom - (value / end) * (height - top - bottom);
  function add(name, attributes, text = "") {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    svg.append(made);
    return made;
  }
  const across = (value, kind) =>
    add("line", { class: kind, x1: left, x2: width - right, y1: y(value), y2: y(value) });
  for (let tick = 0; tick <= end + step / 2; tick += step) {
    across(tick, "axis");
    const text = String(Number(tick.toPrecision(3)));
    add("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, text);
  }
  const every = Math.ceil(values.length / 12);
  values.forEach((_, i) => {
    if (i % every) return;
    add("text", { x: x(i), y: height - bottom + 16, "text-anchor": "middle" }, String(i));
  });
  add("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle" }, "layer");
  add("text", {
    x: 12, y: (height - bottom) / 2, "text-anchor": "middle",
    transform: `rotate(-90 12 ${(height - bottom) / 2})`,
  }, unit);
  if (most !== null) across(most, "most");
  const means = values.map((row) => row.reduce((a, b) => a + b, 0) / row.length);
  add("polyline", { class: "mean", points: means.map((mean, i) => `${x(i)},${y(mean)}`).join(" ") });
  values.forEach((row, i) => row.forEach((value, head) => {
    const dot = add("circle", { class: "head", cx: x(i), cy: y(value), r: 4 });
    const title = document.createElementNS(SVG, "title");
    title.textContent = `layer ${i}, head ${head}: ${value.toPrecision(3)} ${unit}`;
    dot.append(title);
  }));
}

function showDepth() {
  chart("distance", data.distance, "pixels");
  chart("entropy", data.entropy, "nats", data.mostEntropy);
  const cell = (name, text) => element(name, { textContent: text });
  const table = find("numbers");
  const heads = data.distance[0].map((_, head) => cell("th", `head ${head}`));
  table.append(element("tr", {}, cell("th", "layer"), cell("th", ""), ...heads));
  data.distance.forEach((distances, i) => {
    for (const [unit, row] of [["pixels", distances], ["nats", data.entropy[i]]]) {
      const values = row.map((value) => cell("td", value.toPrecision(3)));
      table.append(element("tr", {}, cell("th", String(i)), cell("td", unit), ...values));
    }
  });
}

/** Small images in rows, with gaps between them: `tile(row, column)` returns each as a canvas. */
function drawTiles(canvas, [rows, columns], [height, width], tile) {
  const times = Math.max(1, Math.ceil(900 / (columns * (width + 1))));
  const gap = Math.max(2, Math.round(times * Math.min(1, width / 6)));
  canvas.width = columns * (width * times + gap) - gap;
  canvas.height = rows * (height * times + gap) - gap;
  fit(canvas);
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const drawn = tile(row, column);
      if (drawn === null) continue;
      const [x, y] = [column * (width * times + gap), row * (height * times + gap)];
      context.drawImage(drawn, x, y, width * times, height * times);
    }
  }
}

function showLearned() {
  find("learned").hidden = data.positions === null && data.filters === null;
  if (data.positions !== null) {
    find("positions-panel").hidden = false;
    const { rows, columns, low } = data.positions;
    const levels = bytes(data.positions.levels);
    const canvas = find("positions");
    drawTiles(canvas, [rows.length, columns.length], [ROWS, COLUMNS], (row, column) => {
      const at = (row * columns.length + column) * PATCHES;
      return gridCanvas(levels.subarray(at, at + PATCHES));
    });
    canvas.setAttribute("aria-label", "Position similarity, a map for each patch");
    find("positions-low").textContent = low.toFixed(2).replace(/^-/, "−");
    if (rows.length * columns.length < PATCHES) {
      find("positions-note").textContent =
        `${rows.length} × ${columns.length} of ${ROWS} × ${COLUMNS} patches are shown.`;
    }
  }
  if (data.filters !== null) {
    find("filters-panel").hidden = false;
    const { count, size } = data.filters;
    const levels = bytes(data.filters.levels);
    const area = 3 * size[0] * size[1];
    const columns = Math.min(7, count);
    drawTiles(find("filters"), [Math.ceil(count / columns), columns], size, (row, column) => {
      const at = row * columns + column;
      return at < count ? gridCanvas(levels.subarray(at * area, (at + 1) * area), ...size) : null;
    });
    find("filters").setAttribute("aria-label", `${count} patch filters`);
  }
}

function showFeatures() {
  const { colors, similarity } = data.features;
  find("features").hidden = colors === null && similarity === null;
  if (colors !== null) {
    find("colors-panel").hidden = false;
    const context = canvasOf("colors");
    const levels = bytes(colors);
    context.canvas.setAttribute("aria-label", "Patch features as colors over the image");
    drawMap(context, levels, { alpha: 1 }); // mixed with gray, a color says nothing
  }
  if (similarity === null) return;
  find("similarity-panel").hidden = false;
  const levels = bytes(similarity);
  const context = canvasOf("similarity");
  let chosen = Math.floor(ROWS / 2) * COLUMNS + Math.floor(COLUMNS / 2);
  const setFields = placeFields("alike-row", "alike-column", choose);
  function draw() {
    const row = levels.subarray(chosen * PATCHES, (chosen + 1) * PATCHES);
    drawMap(context, row, { patch: chosen });
    const place = `row ${Math.floor(chosen / COLUMNS)}, column ${chosen % COLUMNS}`;
    context.canvas.setAttribute("aria-label", `Similarity with the patch in ${place}`);
  }
  function choose(patch) {
    if (patch !== null) {
      chosen = patch;
      draw();
    }
    setFields(chosen);
  }
  setFields(chosen);
  onPatch(context.canvas, choose);
  overlays.push(draw);
}

function setTheme() {
  const button = find("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = (isDark) => button.setAttribute("aria-pressed", String(isDark));
  show(dark.matches);
  dark.addEventListener("change", () => {
    if (!document.documentElement.dataset.theme) show(dark.matches);
  });
  button.addEventListener("click", () => {
    const isDark = button.getAttribute("aria-pressed") !== "true";
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    show(isDark);
  });
}

function setStrength() {
  const slider = find("strength");
  const read = () => {
    strength = slider.valueAsNumber / 100;
    find("strength-value").textContent = slider.value + " %";
  };
  slider.addEventListener("input", () => {
    read();
    for (const draw of overlays) draw();
  });
  read();
}

setTheme();
setStrength();
for (const ramp of document.querySelectorAll(".ramp")) {
  ramp.style.background = `linear-gradient(to right, ${VIRIDIS.map((c) => "#" + c).join(", ")})`;
}
showDepth();
showLearned();
image.addEventListener("load", () => {
  showImage();
  showAttention();
  showEvidence();
  showFeatures();
  for (const draw of overlays) draw();
  document.documentElement.dataset.ready = "true";
});
image.src = data.image.source;
