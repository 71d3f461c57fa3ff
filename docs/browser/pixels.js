// From a picture of any size to a model's input, as `keras_vit.preprocessing.preprocess` does it.
//
// A canvas only decodes the picture here. It is resized by hand, because what a browser's own
// resizing computes is not written down anywhere, and a model was trained on one way of doing it.

const MAX_PIXELS = 2 ** 25; // of a picture while it is resized
const ONE = 2 ** 22; // a weight of 1, where weights are integers

// Filters: how far they reach, and their weight at a distance.
const FILTERS = {
  bilinear: [1, (x) => Math.max(0, 1 - x)],
  bicubic: [2, (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : ((-0.5 * x + 2.5) * x - 4) * x + 2)],
  lanczos: [3, (x) => sinc(x) * sinc(x / 3)],
};

/**
 * The input of a model for one picture.
 * @param {ImageData} picture
 * @param {object} record What `readRecord` returns.
 * @returns {Float32Array|Uint8Array} (height, width, channels), as the model takes them.
 */
export function toInput(picture, record) {
  const {config, images} = record;
  const channels = config.in_channels;
  if (channels !== 1 && channels !== 3) {
    throw new Error(`This model takes pictures of ${channels} channels; a browser has 1 or 3.`);
  }
  const pixels = resized(withChannels(picture, channels), config);
  if (images === 'uint8') return Uint8Array.from(pixels);
  const [mean, std] = [config.pixel_mean, config.pixel_std].map((value) =>
    Array.isArray(value) ? value : Array(channels).fill(value),
  );
  return Float32Array.from(pixels, (pixel, i) => {
    const channel = i % channels;
    return (pixel / 255 - mean[channel]) / std[channel];
  });
}

/** A picture without its alpha: {data, height, width, channels}. */
function withChannels({data, height, width}, channels) {
  const pixels = new Uint8Array(height * width * channels);
  for (let i = 0, to = 0; i < data.length; i += 4) {
    const [red, green, blue] = [data[i], data[i + 1], data[i + 2]];
    if (channels === 1) {
      pixels[to++] = (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16; // ITU-R 601-2
    } else {
      pixels[to++] = red;
      pixels[to++] = green;
      pixels[to++] = blue;
    }
  }
  return {data: pixels, height, width, channels};
}

function resized(picture, config) {
  const [height, width] = config.image_size;
  const [full, wide] = covering(picture.height, picture.width, config);
  const most = Math.max(picture.height, full) * Math.max(picture.width, wide);
  if (most > Math.max(MAX_PIXELS, picture.height * picture.width)) {
    throw new Error(`This picture is too narrow: it would become ${wide} x ${full} pixels.`);
  }
  let next = picture;
  if (config.resize_method === 'nearest') {
    next = nearest(next, full, wide);
  } else {
    // Rows first, as Pillow does where the other order is not cheaper.
    if (wide !== next.width) next = transposed(filtered(transposed(next), wide, config));
    if (full !== next.height) next = filtered(next, full, config);
  }
  const [top, left] = [halfOf(full - height), halfOf(wide - width)];
  const row = width * next.channels;
  const cut = new Uint8Array(height * row);
  for (let y = 0; y < height; y++) {
    const start = ((top + y) * wide + left) * next.channels;
    cut.set(next.data.subarray(start, start + row), y * row);
  }
  return cut;
}

/** The size to which a picture is resized before its center is cut out. */
function covering(height, width, config) {
  if (config.crop_fraction === null) return config.image_size;
  const [high, wide] = config.image_size.map((size) => Math.trunc(size / config.crop_fraction));
  const covered = Math.floor((high * width) / height);
  return covered >= wide ? [high, covered] : [Math.floor((wide * height) / width), wide];
}

/** Half of a number, rounded to the even neighbour. */
function halfOf(number) {
  const half = Math.floor(number / 2);
  return half + (number % 2) * (half % 2);
}

/** The rows of a picture, filtered to another number of them, in the integers that Pillow uses. */
function filtered(picture, size, config) {
  const {data, height, width, channels} = picture;
  const [reach, weigh] = FILTERS[config.resize_method];
  const scale = height / size;
  const stretch = Math.max(scale, 1);
  const row = width * channels;
  const result = new Uint8ClampedArray(size * row);
  const sums = new Float64Array(row);
  for (let y = 0; y < size; y++) {
    const center = (y + 0.5) * scale;
    const first = Math.max(0, Math.trunc(center - reach * stretch + 0.5));
    const last = Math.min(height, Math.trunc(center + reach * stretch + 0.5));
    const weights = [];
    for (let i = first; i < last; i++) weights.push(weigh(Math.abs((i + 0.5 - center) / stretch)));
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    sums.fill(ONE / 2);
    weights.forEach((weight, i) => {
      const share = Math.round((weight / total) * ONE);
      const start = (first + i) * row;
      for (let x = 0; x < row; x++) sums[x] += share * data[start + x];
    });
    for (let x = 0; x < row; x++) result[y * row + x] = Math.floor(sums[x] / ONE);
  }
  return {data: result, height: size, width, channels};
}

function nearest({data, height, width, channels}, high, wide) {
  const [rows, columns] = [places(height, high), places(width, wide)];
  const result = new Uint8Array(high * wide * channels);
  let to = 0;
  for (const row of rows) {
    for (const column of columns) {
      const from = (row * width + column) * channels;
      for (let c = 0; c < channels; c++) result[to++] = data[from + c];
    }
  }
  return {data: result, height: high, width: wide, channels};
}

/** The nearest of `count` places for each of `size`; added up step by step, as Pillow does. */
function places(count, size) {
  const step = count / size;
  const found = [];
  for (let i = 0, place = step / 2; i < size; i++, place += step) {
    found.push(Math.min(Math.floor(place), count - 1));
  }
  return found;
}

function transposed({data, height, width, channels}) {
  const result = new Uint8Array(data.length);
  let to = 0;
  for (let x = 0; x < width; x++) {
    for (let y = 0; y < height; y++) {
      const from = (y * width + x) * channels;
      for (let c = 0; c < channels; c++) result[to++] = data[from + c];
    }
  }
  return {data: result, height: width, width: height, channels};
}

function sinc(x) {
  return x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x);
}
