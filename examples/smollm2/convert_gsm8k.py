"""Turn rows of GSM8K (https://github.com/openai/grade-school-math, MIT) into chat JSONL.

    python examples/smollm2/convert_gsm8k.py train.jsonl --rows 400 > examples/smollm2/data/train.jsonl
    python examples/smollm2/convert_gsm8k.py test.jsonl --rows 40 > examples/smollm2/data/test.jsonl

The calculator marks of the data set (`<<48/2=24>>`) are left out: no model is meant to write them.
"""

from __future__ import annotations

import argparse
import json
import re
from itertools import islice
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="train.jsonl or test.jsonl of the data set")
    parser.add_argument("--rows", type=int, default=400, help="the first so many")
    args = parser.parse_args()
    with args.file.open(encoding="utf-8") as lines:
        for line in islice(lines, args.rows):
            row = json.loads(line)
            answer = re.sub(r"<<[^>]*>>", "", row["answer"])
            messages = [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": answer},
            ]
            print(json.dumps({"messages": messages}, ensure_ascii=False))


if __name__ == "__main__":
    main()
