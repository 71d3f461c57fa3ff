// The page: takes a picture or a model by dialog or drop, shows the answer or what is wrong.

import {Classifier} from './classifier.js';

const MODEL = 'model.tflite'; // beside this page
const SHOWN = 5;
const SIDE = 384; // of the preview, at most

const $ = (id) => document.getElementById(id);

let classifier = null;
let queue = Promise.resolve(); // one thing at a time, in the order it was asked for

function say(text) {
  $('status').textContent = text;
}

function complain(text) {
  $('problem').textContent = text;
  $('problem').hidden = !text;
}

/** Runs a task after those before it; what goes wrong is shown. */
function next(task) {
  complain('');
  queue = queue.then(task).catch((error) => {
    say('');
    complain(error?.message ?? String(error));
  });
}

// -- the model

async function openModel(name, bytes) {
  say(`Opening ${name} ...`);
  let opened;
  try {
    opened = await Classifier.open(bytes);
  } catch (error) {
    const kept = classifier ? ' The model before it stays.' : '';
    throw new Error(`${name}: ${error?.message ?? error}${kept}`);
  }
  classifier?.close();
  classifier = opened;
  $('answer').hidden = true;
  const {config, quantize} = classifier.record;
  const [height, width] = config.image_size;
  const kind = quantize ?? 'float32';
  const size = (bytes.length / 1e6).toFixed(1);
  $('about').textContent =
    `${name}: ${config.num_classes} classes, ${width} x ${height} pixels, ${kind}, ${size} MB`;
  $('picture').disabled = false;
  say('Ready.');
}

async function openFirst() {
  say(`Loading ${MODEL} ...`);
  const response = await fetch(MODEL).catch(() => null);
  if (!response?.ok) {
    throw new Error(`There is no ${MODEL} beside this page: choose a .tflite file.`);
  }
  await openModel(MODEL, new Uint8Array(await response.arrayBuffer()));
}

// -- the picture

async function decoded(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, {colorSpaceConversion: 'none', premultiplyAlpha: 'none'});
  } catch {
    throw new Error(`${file.name} is not a picture that this browser can read.`);
  }
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext('2d', {willReadFrequently: true});
  if (!context) throw new Error(`${file.name} is too large for this browser.`);
  context.drawImage(bitmap, 0, 0);
  try {
    return {bitmap, picture: context.getImageData(0, 0, bitmap.width, bitmap.height)};
  } catch {
    throw new Error(`${file.name} is too large for this browser.`);
  }
}

async function classify(file) {
  if (!classifier) throw new Error('Choose a model first: a .tflite file.');
  say(`Looking at ${file.name} ...`);
  $('answer').hidden = true;
  const {bitmap, picture} = await decoded(file);
  const {classes, milliseconds} = await classifier.classify(picture);
  preview(bitmap, file.name);
  bitmap.close();
  $('classes').replaceChildren(...classes.slice(0, SHOWN).map(row));
  $('answer').hidden = false;
  const [top] = classes;
  const time = milliseconds.toFixed(1);
  say(`${file.name}: ${top.name}, ${percent(top.probability)}, in ${time} ms.`);
}

function preview(bitmap, name) {
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = $('preview');
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext('2d').drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  canvas.setAttribute('aria-label', name);
}

function row({name, probability}) {
  const item = document.createElement('li');
  const title = document.createElement('span');
  title.className = 'name';
  title.textContent = name;
  const value = document.createElement('data');
  value.value = probability;
  value.textContent = percent(probability);
  const track = document.createElement('div');
  track.className = 'track';
  const bar = document.createElement('div');
  bar.className = 'bar';
  bar.style.width = `${100 * probability}%`;
  track.append(bar);
  item.append(title, value, track);
  return item;
}

function percent(probability) {
  return `${(100 * probability).toFixed(1)} %`;
}

// -- what the visitor does

function takeModel(file) {
  next(async () => openModel(file.name, new Uint8Array(await file.arrayBuffer())));
}

function takePicture(file) {
  next(() => classify(file));
}

for (const [name, take] of [['picture', takePicture], ['model', takeModel]]) {
  $(name).addEventListener('change', () => {
    const [file] = $(name).files;
    $(name).value = ''; // so that the same file can be chosen again
    if (file) take(file);
  });
}

for (const name of ['dragover', 'dragleave', 'drop']) {
  document.addEventListener(name, (event) => {
    event.preventDefault(); // a browser would open the file instead
    document.body.classList.toggle('over', name === 'dragover');
    const file = name === 'drop' && event.dataTransfer?.files[0];
    if (file) (file.name.endsWith('.tflite') ? takeModel : takePicture)(file);
  });
}

next(openFirst);
