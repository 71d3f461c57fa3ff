// What a .tflite file of keras_vit says of itself: JSON in its metadata, under the name "keras_vit".
//
// The file is a FlatBuffer. A table starts with the distance back to its list of fields, which holds
// one 16-bit place for each field by its number, 0 where it is left out.

const RECORD = 'keras_vit';
const FORMAT = 1;
const IDENTIFIER = 'TFL3';
// Numbers of fields in the schema of TFLite.
const MODEL = {buffers: 4, metadata: 6};
const METADATA = {name: 0, buffer: 1};
const BUFFER = {data: 0};

/**
 * Reads what the file was exported as.
 * @param {Uint8Array} bytes The file.
 * @returns {object} `config`, `labels`, `activation`, `output`, `images` and so on.
 */
export function readRecord(bytes) {
  const tail = 'It must be a .tflite file that keras_vit wrote.';
  if (text(bytes.subarray(4, 8)) !== IDENTIFIER) throw new Error(`This is not a TFLite file. ${tail}`);
  let record;
  try {
    record = find(new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength), bytes);
  } catch (error) {
    throw new Error(`This TFLite file is damaged (${error.message}). ${tail}`);
  }
  if (!record) throw new Error(`This TFLite file does not say how it takes pictures. ${tail}`);
  if (record.format !== FORMAT) {
    throw new Error(`This file has format ${record.format}, and this page reads ${FORMAT}.`);
  }
  return record;
}

function find(view, bytes) {
  const model = follow(view, 0);
  const pieces = field(view, model, MODEL.metadata);
  if (!pieces) return null;
  for (const piece of tables(view, pieces)) {
    const name = field(view, piece, METADATA.name);
    if (!name || text(vector(view, bytes, name)) !== RECORD) continue;
    const place = field(view, piece, METADATA.buffer);
    const number = place ? view.getUint32(place, true) : 0;
    const buffer = tables(view, field(view, model, MODEL.buffers))[number];
    return JSON.parse(text(vector(view, bytes, field(view, buffer, BUFFER.data))));
  }
  return null;
}

/** Where a field of a table stands, or 0 where the table has none. */
function field(view, table, number) {
  const fields = table - view.getInt32(table, true);
  const entry = 4 + 2 * number; // behind two sizes
  if (entry >= view.getUint16(fields, true)) return 0;
  const distance = view.getUint16(fields + entry, true);
  return distance && table + distance;
}

function follow(view, place) {
  return place + view.getUint32(place, true);
}

function tables(view, place) {
  const start = follow(view, place);
  const count = view.getUint32(start, true);
  if (start + 4 + 4 * count > view.byteLength) throw new RangeError('a list is longer than the file');
  return Array.from({length: count}, (_, i) => follow(view, start + 4 + 4 * i));
}

function vector(view, bytes, place) {
  const start = follow(view, place);
  return bytes.subarray(start + 4, start + 4 + view.getUint32(start, true));
}

function text(bytes) {
  return new TextDecoder().decode(bytes);
}
