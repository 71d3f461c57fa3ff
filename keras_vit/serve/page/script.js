"use strict";

const find = (id) => document.getElementById(id);
const percent = (share) => (100 * share).toPrecision(share < 0.1 ? 2 : 3) + " %";
// The color map viridis at 10 places, between which it is nearly straight.
const VIRIDIS = [
  [68, 1, 84], [72, 35, 116], [64, 69, 136], [48, 103, 141], [36, 134, 142],
  [31, 161, 136], [68, 191, 112], [122, 209, 81], [189, 223, 38], [253, 231, 37],
];

let models = [];
let picture = null; // the file that was chosen last
let shown = null; // what the server answered for it
let image = null; // the picture as the server saw it
let asking = null; // the request that is under way

function color(level) {
  const place = (level / 255) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(place), VIRIDIS.length - 2);
  return VIRIDIS[low].map((a, i) => Math.round(a + (place - low) * (VIRIDIS[low + 1][i] - a)));
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function say(text, failed = false) {
  find("status").textContent = text;
  find("status").classList.toggle("failed", failed);
}

async function answer(response) {
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(content.error || `The server answered ${response.status}.`);
  return content;
}

// -- the models

async function loadModels() {
  models = (await answer(await fetch("playground/models"))).models;
  find("model").replaceChildren(
    ...models.map((model, i) =>
      element("option", { value: String(i), textContent: `${model.name}, version ${model.version}` })
    )
  );
  showFacts();
}

function showFacts() {
  const model = models[find("model").value];
  find("facts").textContent = model ? `${model.facts}. ${model.engine}.` : "No model is loaded.";
}

// -- a picture

async function look() {
  const model = models[find("model").value];
  if (!picture || !model) return;
  if (asking) asking.abort();
  const mine = (asking = new AbortController());
  say(`Looking at ${picture.name || "the picture"} …`);
  try {
    const query = new URLSearchParams({ model: model.name, version: model.version });
    const response = await fetch(`playground/look?${query}`, {
      method: "POST",
      body: picture,
      headers: { "Content-Type": "application/octet-stream" },
      signal: mine.signal,
    });
    const found = await answer(response);
    const drawn = new Image();
    drawn.src = found.image.source;
    await drawn.decode();
    if (asking !== mine) return;
    [shown, image] = [found, drawn];
    show();
    find("result").scrollIntoView({ block: "nearest" });
    say("");
  } catch (error) {
    if (asking !== mine) return;
    find("result").hidden = true;
    say(error instanceof TypeError ? "The server does not answer." : error.message, true);
  }
  document.documentElement.dataset.looked = String(Number(document.documentElement.dataset.looked || 0) + 1);
}

function take(file) {
  if (!file) return;
  picture = file;
  look();
}

// -- the answer

function show() {
  find("result").hidden = false;
  const classes = shown.classes || [];
  find("answer").hidden = !classes.length;
  find("no-classes").hidden = classes.length > 0;
  find("classes").replaceChildren(
    ...classes.map((found) =>
      element(
        "li",
        {},
        bar(found.score),
        element("span", { textContent: found.label }),
        element("span", { textContent: percent(found.score) })
      )
    )
  );
  find("maps").hidden = !shown.maps.length;
  find("why").hidden = !shown.why;
  find("why").textContent = shown.why || "";
  const names = [...shown.maps.map((map) => map.name), "The picture alone"];
  find("choices").replaceChildren(
    ...names.map((name, i) =>
      element(
        "label",
        {},
        element("input", { type: "radio", name: "map", value: String(i), checked: i === start() }),
        element("span", { textContent: name })
      )
    )
  );
  draw();
}

function bar(share) {
  const made = element("i");
  made.style.width = `${100 * share}%`;
  return made;
}

/** The map that is shown first: Grad-CAM of the best class, if there is one. */
function start() {
  const cam = shown.maps.findIndex((map) => map.name.startsWith("Grad-CAM"));
  return Math.max(cam, 0);
}

function chosenMap() {
  const chosen = document.querySelector("input[name=map]:checked");
  return shown.maps[chosen ? Number(chosen.value) : -1] || null;
}

function draw() {
  const canvas = find("image");
  const [width, height] = shown.image.shown;
  const times = Math.max(1, Math.ceil(480 / Math.max(width, height)));
  [canvas.width, canvas.height] = [width * times, height * times];
  canvas.style.width = `min(100%, ${((28 * width) / height).toFixed(2)}rem)`;
  const context = canvas.getContext("2d");
  const map = chosenMap();
  context.imageSmoothingEnabled = !shown.image.small;
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const area = shown.image.seen.map((n, i) => n * (i % 2 ? canvas.height : canvas.width));
  if (map) {
    context.globalCompositeOperation = "saturation";
    context.fillStyle = "hsl(0, 0%, 50%)";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.globalCompositeOperation = "source-over";
    context.globalAlpha = Number(find("strength").value) / 100;
    context.imageSmoothingEnabled = false;
    context.drawImage(colored(map), ...area);
    context.globalAlpha = 1;
  }
  const [left, top, wide, high] = area;
  context.fillStyle = "rgba(0, 0, 0, 0.6)"; // over what the model does not see
  context.beginPath();
  context.rect(0, 0, canvas.width, canvas.height);
  context.rect(left, top, wide, high);
  context.fill("evenodd");
  const whole = area[2] > 0.999 * canvas.width && area[3] > 0.999 * canvas.height;
  const rest = whole ? "" : " The dark parts are cropped: the model does not see them.";
  find("caption").textContent = (map ? map.about : "The picture.") + rest;
  canvas.ariaLabel = map ? `The picture with the map ${map.name}` : "The picture";
  find("scale").hidden = !map;
  if (map) find("peak").textContent = map.peak.toPrecision(2);
}

/** A map as a canvas with one pixel a patch. */
function colored(map) {
  const [rows, columns] = shown.grid;
  const canvas = element("canvas", { width: columns, height: rows });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  const letters = atob(map.levels);
  for (let i = 0; i < rows * columns; i++) {
    pixels.data.set([...color(letters.charCodeAt(i)), 255], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

// -- events

find("model").addEventListener("change", () => {
  showFacts();
  look();
});
find("file").addEventListener("change", (event) => {
  take(event.target.files[0]);
  event.target.value = ""; // so that the same file can be chosen again
});
find("choices").addEventListener("change", draw);
find("strength").addEventListener("input", draw);
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    find("drop").classList.add("over");
  });
}
for (const name of ["dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    find("drop").classList.remove("over");
  });
}
document.addEventListener("drop", (event) => take(event.dataTransfer.files[0]));
document.addEventListener("paste", (event) => take(event.clipboardData.files[0]));
loadModels()
  .catch((error) => say(error.message, true))
  .finally(() => (document.documentElement.dataset.ready = "true"));
