// A .tflite file on LiteRT for the web: pictures in, classes and their probabilities out.

import {readRecord} from './model-file.js';
import {toInput} from './pixels.js';

const WASM = new URL('node_modules/@litertjs/core/wasm/', import.meta.url).href;

let started = null;

/** LiteRT, started once, from the copy that npm put beside this page. */
function litert() {
  started ??= import('@litertjs/core').then(async (library) => {
    await library.loadLiteRt(WASM);
    return library;
  });
  return started.catch((error) => {
    started = null;
    throw new Error(
      `LiteRT could not be started (${error?.message ?? 'a file is missing'}). ` +
        'Run "npm install" in the folder of this page.',
    );
  });
}

/** A model that classifies pictures. `Classifier.open` makes one; `close` frees its memory. */
export class Classifier {
  /** @param {Uint8Array} bytes A .tflite file that keras_vit wrote. */
  static async open(bytes) {
    const record = readRecord(bytes);
    if (record.output === 'features' || record.config.pooling === null) {
      throw new Error('This file gives features, not classes. Export it with output="probabilities".');
    }
    const library = await litert();
    const model = await library.loadAndCompile(bytes, {accelerator: 'wasm'});
    const shape = Array.from(model.getInputDetails()[0].shape);
    if (shape[0] !== 1) {
      model.delete();
      // LiteRT for the web cannot be told how many pictures there are.
      const count = shape[0] < 0 ? 'any number of' : shape[0];
      throw new Error(`This file takes ${count} pictures at a time. Export it with batch_size=1.`);
    }
    return new Classifier(library, model, record, shape);
  }

  constructor(library, model, record, shape) {
    this.library = library;
    this.model = model;
    this.record = record;
    this.shape = shape;
  }

  /**
   * Classifies one picture.
   * @param {ImageData} picture
   * @returns {Promise<{classes: {name: string, probability: number}[], milliseconds: number}>}
   *     Every class, the likeliest first; and how long the model took.
   */
  async classify(picture) {
    const input = new this.library.Tensor(toInput(picture, this.record), this.shape);
    const start = performance.now();
    let values;
    try {
      const [output] = await this.model.run(input);
      values = Array.from(await output.data());
      output.delete();
    } finally {
      input.delete();
    }
    const milliseconds = performance.now() - start;
    const {labels, output, activation} = this.record;
    const probabilities = output === 'logits' ? activated(values, activation) : values;
    const classes = probabilities.map((probability, i) => ({
      name: labels?.[i] ?? `class ${i}`,
      probability,
    }));
    classes.sort((one, other) => other.probability - one.probability);
    return {classes, milliseconds};
  }

  close() {
    this.model.delete();
  }
}

function activated(logits, activation) {
  if (activation === 'sigmoid') return logits.map((value) => 1 / (1 + Math.exp(-value)));
  const top = Math.max(...logits);
  const raised = logits.map((value) => Math.exp(value - top));
  const total = raised.reduce((sum, value) => sum + value, 0);
  return raised.map((value) => value / total);
}
