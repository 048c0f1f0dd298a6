"""Writes a GGUF file with the weights dequantised to f32 by the package `gguf`: both files must have equal losses.

    pip install gguf numpy
    python3 tools/gguf_to_f32.py MODEL.gguf OUT.gguf
    kvant eval --model MODEL.gguf --kv f32; kvant eval --model OUT.gguf --kv f32
"""

import sys

import gguf
import numpy as np


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    reader = gguf.GGUFReader(sys.argv[1])
    writer = gguf.GGUFWriter(sys.argv[2], reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, inner = field.types[0], field.types[-1]
        is_array = kind == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), kind, sub_type=inner if is_array else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
