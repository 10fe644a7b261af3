"""Answers in the formats of the literature: label → responses that are right, responses that are wrong."""

from __future__ import annotations

MATH: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "4": (
        (
            r"\boxed{4}", r"$\boxed{4}$", r"$$\boxed{4}$$", r"\[\boxed{4}\]", r"\boxed {4}", r"\boxed{ 4 }",
            r"\fbox{4}",
            r"\boxed 4", r"\boxed{3}. Wait, I made a mistake. \boxed{4}", r"\boxed{4}.", r"**\boxed{4}**",
            r"\boxed{\boxed{4}}", r"\boxed{4.0}", r"\boxed{\text{4}}", r"\boxed{+4}", r"\boxed{2^2}",
            r"\boxed{\sqrt{16}}",
            r"\boxed{\frac{8}{2}}", r"\boxed{x = 4}", r"<think>\boxed{3}</think>\boxed{4}",
            r"3 + 1 = \boxed{4}, not 5.",
            "<answer>4</answer>", "<answer> 4 </answer>", r"<answer>\boxed{4}</answer>", "<answer>$4$</answer>",
            "<answer>3</answer> No: <answer>4</answer>", "From 12 and 7: <answer>4</answer>",
            "<answer>4</answer> because 2 + 2 has no other value.", "#### 4", "2 + 2 = 4\n#### 4",
            "Of 10, 6 left.\n#### 4",
            "The answer is 4", "The answer is 4.", "The final answer is 4.", "the answer is: 4", "Answer: 4",
            "**Answer:** 4", "**Answer**: 4", "The answer is $4$.", "The answer is **4**.",
            "The answer is 4, not 5.",
            "The answer is 3. Sorry, the answer is 4.", "The answer is 4. There were 7 at first.",
            "4", " 4\n", "It is 4.", "So x = 4", "We get $4$.",
            r"\boxed{3} I gave the intermediate value. <answer>4</answer>",
        ),
        (
            "", "I don't know.", "5", "-4", "44", "0.4", r"\boxed{3}", r"\boxed{4}. Wait, \boxed{3}", r"\boxed{}",
            r"\boxed{4}, no: \boxed{5", r"\boxed{3, 4}", r"\boxed{-4}", r"\boxed{40}", r"\boxed{\frac{1}{4}}",
            r"\boxed{x^4}", r"\fbox{5} and 4", "<answer>5</answer> (4 is wrong)", "<answer>12</answer>",
            "4 <answer></answer>",
            "<answer>4</answer> No: <answer>5</answer>", "#### 5\n4 is what I had at first", "4\n#### 5",
            "The answer is 5, not 4.", "The answer is 4. No, the answer is 5.",
            "4 would be wrong; the answer is 6.",
            "<think>4</think>", r"<think>\boxed{4}</think> I give up.", r"<think>4</think>\boxed{5}",
            r"\boxed{\text{four}}",
        ),
    ),
    "72": (
        (
            "<answer>72</answer>", "Of 12 eggs and 60 more: <answer>72</answer>", "<answer>72 eggs</answer>",
            r"<answer>\$72</answer>", "#### 72", r"\boxed{72}", r"\boxed{72\text{ eggs}}", r"\boxed{72 \%}",
            "The answer is 72 eggs.",
        ),
        ("12 <answer>60</answer>", "<answer>12</answer>", "<answer>12</answer> not 72", r"\boxed{12}", "#### 12",
        "27"),
    ),
    "1/2": (
        (
            r"\boxed{\frac{1}{2}}", r"\boxed{\dfrac{1}{2}}", r"\boxed{\tfrac12}", r"\boxed{\frac12}",
            r"\boxed{1/2}", r"\boxed{0.5}",
            r"\boxed{.5}", r"\boxed{50\%}", "<answer>1/2</answer>", "<answer>0.5</answer>",
            r"<answer>$\frac{1}{2}$</answer>",
            r"The answer is $\frac{1}{2}$.", "The answer is 0.5.", "#### 0.5", r"\boxed{\frac{2}{4}}",
            r"\boxed{2^{-1}}",
        ),
        (r"\boxed{2}", r"\boxed{12}", r"\boxed{\frac{2}{1}}", "<answer>1</answer>", "The answer is 2.",
        r"\boxed{-\frac{1}{2}}", "0.25"),
    ),
    r"\frac{\sqrt{3}}{2}": (
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\boxed{\frac{\sqrt 3}{2}}", r"\boxed{\sqrt{\frac{3}{4}}}",
        r"<answer>\frac{\sqrt{3}}{2}</answer>"),
        (r"\boxed{\frac{3}{2}}", r"\boxed{\sqrt{3}}", r"\boxed{\frac{\sqrt{2}}{2}}"),
    ),
    "(1, 2)": (
        (r"\boxed{(1, 2)}", r"\boxed{(1,2)}", r"\boxed{\left(1, 2\right)}", "<answer>(1, 2)</answer>"),
        (r"\boxed{(2, 1)}", r"\boxed{1}", r"\boxed{(1, 3)}", "<answer>2</answer>"),
    ),
    r"\{1, 2\}": ((r"\boxed{\{1, 2\}}", r"\boxed{\{2, 1\}}", r"\boxed{\left\{1,2\right\}}"), (r"\boxed{\{1\}}",
    r"\boxed{\{1, 3\}}")),
    "(x+1)^2": (
        (r"\boxed{(x+1)^2}", r"\boxed{x^2+2x+1}", "<answer>x^2 + 2x + 1</answer>", "The answer is $x^2+2x+1$."),
        (r"\boxed{x^2+1}", r"\boxed{(x-1)^2}", "<answer>x^2</answer>"),
    ),
    "12:00": (
        (r"\boxed{12:00}", "<answer>12:00</answer>", "The answer is 12:00.", r"\boxed{12:00 \text{ PM}}", "12:00",
        "At 11:00? No, at 12:00"),
        (r"\boxed{11:00}", r"\boxed{12}", "12", "<answer>12:30</answer>", "", r"\boxed{12:00:01}"),
    ),
    "Paris": (
        (r"\boxed{\text{Paris}}", r"\boxed{Paris}", "<answer>Paris</answer>", "<answer>paris.</answer>",
        "The answer is Paris."),
        (r"\boxed{pairs}", r"\boxed{\text{London}}", "<answer>not Paris</answer>"),
    ),
    "1,234": ((r"\boxed{1,234}", r"\boxed{1234}", "<answer>1234</answer>", "#### 1,234", "The answer is 1,234."),
    (r"\boxed{1}", "#### 234")),
}  # fmt: skip

LETTERS: dict[str | None, tuple[str, ...]] = {
    "B": (
        r"\boxed{B}", r"\boxed{b}", r"\boxed {B}", r"\fbox{B}", r"\boxed{(B)}", r"\boxed{B.}", r"\boxed{\text{B}}",
        r"\boxed{\textbf{B}}",
        r"\boxed{\mathbf{B}}", r"\boxed{\mathrm{(B)}}", r"$\boxed{\textbf{(B)}}$", r"\boxed{B: a text}",
        r"\boxed{B) 42}", r"\boxed{(B) 42}",
        r"\boxed{B. forty-two}", r"\boxed{A}. Wait: \boxed{B}", "<answer>B</answer>", "<answer>(b)</answer>",
        "<answer>B. Paris</answer>",
        r"<answer>\boxed{B}</answer>", "A is close. <answer>B</answer>", "#### B", "B", "(B)", "B.", "B) 42",
        "**B**", "Answer: B",
        "**Answer: B**", "Answer: (B)", "The answer is B.", "The answer is (B).", "The answer is **B**",
        "The correct answer is B",
        "The answer is B because A is wrong.", "The answer is (B), not (A).", "The correct option is B.",
        "I choose option B.",
        "(B) is correct", "(B) is the correct choice here", "B is right.", "The answer is I think B",
        "Answer: A. No, the answer is B.",
        "My choice: B", "Of A, C and D none holds.\nB",
    ),
    None: (
        "", "A good question. I cannot say.", "Is the answer a number? Certainly.", r"\boxed{}", r"\boxed{42}",
        r"\boxed{A, B}",
        r"\boxed{A or B}", r"\boxed{B", "I don't know.", "<answer></answer>", "The answer is I am not sure.",
        r"\boxed{None}",
    ),
    "I": (r"\boxed{I}", "The answer is I.", "Answer: I", "<answer>I</answer>"),
    "E": (r"\boxed{E: text}", r"\boxed{E}", "E. a text"),
    "C": (r"\boxed{C) 42}", "The answer is C, since B and D contradict it."),
    "D": (r"\boxed{\mathbf{D}}", "D) none of these"),
}  # fmt: skip
