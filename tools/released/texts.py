"""The inputs of the test bed of released models: a text, strings that are hard for tokenizers, questions."""

import json
import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RUSTDOC = os.path.join(ROOT, "models", "rustdoc-valid.txt")
REQUIREMENTS = os.path.join(ROOT, "tools", "released", "requirements.txt")
CHATS = os.path.join(ROOT, "crates", "kvant-models", "tests", "golden", "chat", "templates.json")

MIXED = '''The harbour master wrote three letters on 7 March 1998: one to the mayor, one to her brother, and one that she
never sent. "If the tide turns before noon," it began, "we shall lose the northern pier, and £12,500.75 with it."

```python
def median(values: list[float]) -> float:
    """The middle value; the mean of the two middle ones if their number is even."""
    ordered = sorted(values)
    half, odd = divmod(len(ordered), 2)
    return ordered[half] if odd else (ordered[half - 1] + ordered[half]) / 2
```

SELECT name, COUNT(*) FROM ships WHERE tonnage >= 1000 GROUP BY name;

Größe und Maß — naïve café, Ærøskøbing, Łódź, İstanbul. Привет, мир! Γειά σου Κόσμε. 你好,世界。こんにちは世界。안녕하세요. مرحبا بالعالم. שלום עולם.
नमस्ते दुनिया. 👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇭 ½ ≤ ∑ x² → ∞. e\u0301 is not é.

'''


def long_text():
    """English, code and Unicode, then a page of documentation."""
    with open(RUSTDOC, encoding="utf-8") as file:
        return MIXED + file.read(6000)


# Strings that reveal a wrong pattern, normaliser, merge order or special token. Lone surrogates cannot be sent as JSON:
# clients replace them.
STRINGS = [
    "", " ", "  ", "   ", "       ", " " * 16, " " * 17, " " * 200, " a", "a ", "  a", "a  b", "a   b    c", " \u2581a", "\u2581", "a\u2581b",
    "\t", "\t\t", "\t\t\t\tx", " \t ", "\ta\t", "\n", "\n\n", "\n\n\n", "\n" * 9, " \n", "\n ", " \n \n ", "a\nb", "a\n\n\nb", "a \nb", "a\n b",
    "\r", "\r\n", "a\r\nb\r\n\r\nc", "a\rb", "\r\r\n\n", "\v\f", "\u0085a\u2028b\u2029c", "\x00", "a\x00b", "\x01\x02\x1b[31mred\x1b[0m\x7f", "\x08\x07",
    "'s 't 're 've 'm 'll 'd", "'S 'T 'RE I'M we'LL", "it\u2019s don\u2019t", "don't can't, won't; shan't!", "x's'y", "''s", "'Š",
    "0", "12", "123", "1234", "12345678901234567890", "1,234,567.89", "3.14159e-10", "1 2 3  4   5", "a1b2c3", "0x1F", "٣٤٥", "१२३", "½⅓²³", "一二三", "x1 2y",
    "Hello world", "HelloWorld", "HELLO", "hello, world!", "snake_case camelCase kebab-case", "!!!???...", "a.b.c", "http://a.b/c?d=e&f=%20#g", "me@x.org",
    "---", "----------------", "=" * 65, "#" * 100, "a" * 300, "ab" * 150, "\u00a0", "a\u00a0b", "\u200b", "a\u200bb\u200cc\u200dd", "\ufeff", "\ufeffabc", "\u3000a\u3000",
    "é", "e\u0301", "ﬁ ﬂ ﬀ", "Å Å Å", "①②③", "ＡＢＣ１２３", "ñ n\u0303 N\u0303", "z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324", "a\u0308\u0323 a\u0323\u0308",
    "👩‍👩‍👧‍👦", "🏳️‍🌈🏴‍☠️", "👍🏽👍🏿", "🇨🇭🇩🇪🇺", "❤️ ❤", "☺☺☺ 🙂🙂", "🦀" * 20, "\U0001f9ff\U0010ffff", "\ufffd", "a\ufffdb\ufffd\ufffd", "\ufdd0\uffff",
    "你好世界", "你好,世界。", "日本語のテスト", "カタカナ ｶﾀｶﾅ", "한국어 테스트", "ᄒ\u1161ᆫ", "𠀀𠀁", "ภาษาไทย", "မြန်မာ", "हिन्दी क्षत्रिय", "தமிழ்", "አማርኛ",
    "مرحبا بالعالم", "لا إله", "שָׁלוֹם", "\u202eright\u202c", "Привет, мир", "İstanbul ıI", "ŒœßẞſŠ", "Ǆǅǆ", "Ωμέγα ΣΑΣ σας", "𝕳𝖊𝖑𝖑𝖔 𝟙𝟚𝟛",
    "<|im_start|>", "<|im_end|>", "<|im_start|>user\nHi<|im_end|>\n", "a<|im_end|>b", " <|im_end|> ", "<|im_end|", "<|im_end |>", "<|IM_END|>", "<|endoftext|>",
    "<bos>", "<eos>", "<pad>", "<unk>", "<s>", "</s>", "[INST]", "[CLS]", "<start_of_turn>user\nHi<end_of_turn>\n", "<end_of_turn>  x", "<unused5>",
    "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>", "<tool_call>\n{}\n</tool_call>", "<think></think>", "<0x0A>", "<0x41><0xFF>", "<repo_name>x<file_sep>",
    "<|file_sep|>", "<html><body>&nbsp;</body></html>", "<h1>x</h1><table>", "<jupyter_code>", "<<|im_end|>>",
    "fn main() {\n    println!(\"{}\", 1 + 2);\n}\n", "\tif (x) {\n\t\treturn;\n\t}", "def f(x):\n        return x**2  # comment\n\n\n", "a+=b-=c*=d/=e", "(((([[[[{{{{",
    "{\"a\": [1, 2.5, null], \"b\": \"\\u00e9\"}", "C:\\path\\to\\file", "\\n\\t\\\\", "`a` **b** _c_ ~~d~~", "| a | b |\n|---|---|\n", "$\\frac{a}{b}$", "a\t b \tc",
    "supercalifragilisticexpialidocious", "Donaudampfschifffahrtsgesellschaft", "the the the  the", "The quick brown fox jumps over the lazy dog.",
    "ÀÁÂÃÄÅ", "…–—‘’“”", "©®™°±×÷", "x\u20dd y\u0338", "\u1e9b\u0323", "\ue000\uf8ff", "a\u00adb", "\u2003\u2009a\u202fb",
]

# Prompts whose answers are compared: `user` is a message, `text` a text to continue.
QUESTIONS = [
    {"user": "What is a hash map? Answer in two sentences."},
    {"system": "You write code without comments.", "user": "Write a function in Python that reverses a list."},
    {"user": "Translate into French: \u201eDie Brücke über den Fluss ist alt.\u201c"},
]
CONTINUATIONS = [
    {"text": "The capital of France is"},
    {"text": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n"},
    {"text": "User: Why is the sky blue?\n\nAssistant:"},
]


def messages(question):
    return [{"role": role, "content": question[role]} for role in ("system", "user") if role in question]


# The conversations that a template renders, by their names in CHATS. Conversations with tools are rendered with both
# tools. Contents in parts are excluded: kvant joins them for a template that does not support them, and transformers
# fails.
PLAIN = ["hello", "system", "turns", "system turns", "unicode", "empty", "two users", "starts with assistant"]
WITH_TOOLS = ["hello", "system", "call", "call and text", "result", "answered", "two calls"]


def chats():
    """Every rendering: its name, messages, tools, and whether the prompt of the answer follows.

    A null content is "", as kvant passes it to templates: some cannot render null, and answers with calls have it.
    """
    with open(CHATS, encoding="utf-8") as file:
        data = json.load(file)
    for messages in data["conversations"].values():
        for message in messages:
            message["content"] = message.get("content") or ""
    for is_prompt in (True, False):
        for name in PLAIN:
            yield f"{name}, {is_prompt}", data["conversations"][name], None, is_prompt
    for name in WITH_TOOLS:
        yield f"{name}, tools", data["conversations"][name], data["tools"]["two"], True


# Strings that transformers and llama.cpp split differently: the reference whose ids kvant must have, and the reason.
MERGED = "transformers derives merges from the file's scores, in an order in which equal scores are not those of the vocabulary"
DIFFERENCES = {
    "smollm2": {
        "1 2 3  4   5": (
            "llama.cpp",
            "transformers' conversion of GGUF splits words before digits; the model's own tokenizer splits digits first",
        ),
    },
    "gemma3": {" " * 200: ("llama.cpp", MERGED), " \u2581a": ("llama.cpp", MERGED)},
    "qwen2.5": {
        "</s>": ("transformers", "an ordinary token of the file; llama.cpp makes a special token of every token with this text"),
    },
}
# The first step of the model's tokenizer.json. The file has no key for it, kvant derives it from `tokenizer.ggml.pre`,
# and both references omit it: they get the composed text.
NORMALISED = {"qwen2.5": "NFC"}
