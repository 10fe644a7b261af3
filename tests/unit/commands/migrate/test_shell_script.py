"""Words of a shell script that is read, not run: where an array ends, what can be computed, what a condition decides.

# covers: P8
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from miles_async.commands.migrate.shell_script import ShellCommand, find_command
from miles_async.errors import ConfigurationError


def read(script: str, **given: str) -> ShellCommand:
    """``script``, and a command with the words of ARGS. ``given``: variables from outside."""
    return find_command(f"{script}\npython3 train.py ${{ARGS[@]}}\n", ["train.py"], Path("no_such_folder"), given)


def test_an_array_ends_at_its_own_bracket() -> None:
    command = read(
        "ARGS=(\n --rollout-max-response-len $((1024 * 8))\n --sglang-cuda-graph-bs 1 2 $(seq 16 8 32)\n"
        " --n-samples-per-prompt 4\n)\n"
    )
    assert command.words == [
        *("--rollout-max-response-len", "8192", "--sglang-cuda-graph-bs", "1", "2", "16", "24", "32"),
        *("--n-samples-per-prompt", "4"),
    ]
    assert command.unknown == []


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("ARGS=(--a 'x)' \\) \"y)\" 1)  # a)", ["--a", "x)", ")", "y)", "1"]),
        ("A=1; B=2; ARGS=(--a $A --b $B)", ["--a", "1", "--b", "2"]),
        ("A='1;'; B=\"2\"; C=$((B+1)); ARGS=(--a $A --b $B --c $C)", ["--a", "1;", "--b", "2", "--c", "3"]),
        ("C=4; D=5\nARGS=(--a ${A:-${B:-${C}}} --b ${B:-3})", ["--a", "4", "--b", "3"]),
        ("ARGS=(--a 1); ARGS+=(--b 2)", ["--a", "1", "--b", "2"]),
        ("ARGS=(--a\n  1  # one)\n  --b) # two", ["--a", "1", "--b"]),
        ("N=24\nARGS=(--a $(seq 8 8 $N))", ["--a", "8", "16", "24"]),
        ("ARGS=(--a $(seq 3) $(seq 4 5) $(seq 9 -2 5) $(seq 2 1))", ["--a", *"12345975"]),
    ],
)  # fmt: skip
def test_words_of_arrays(script: str, words: list[str]) -> None:
    command = read(script)
    assert command.words == words
    assert (command.unknown, command.conditional) == ([], [])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=$((1024 * 8))", "8192"),
        ("N=3\nA=$(( (N + 1) * 2 / 4 ))", "2"),
        ("A=${A:-5}", "5"),
        ("B=${B:-7}\nA=${A:-$B}", "7"),
        ("A=${A}", "${A}"),
        ("B=${B:-}\nA=${B:-7}", "7"),
        ("B=\nA=${B-7}", ""),
        ("H=${HOME_OF:-'/h'}\nA=${A:-\"${H}/x\"}", "/h/x"),
        ("A=$(($UNKNOWN + 1))", "$(($UNKNOWN+1))"),
        ("M=Org/Model-B\nA=${M,,}", "org/model-b"),
        ("M=Org/Model-B\nA=${M^^}", "ORG/MODEL-B"),
        ("M=Org\nA=${M,}", "org"),
        ("M=org\nA=${M^}", "Org"),
        ("M=Org/Model-B\nA=$(basename ${M,,})-x", "model-b-x"),
        ("A=${M,,}", "${M,,}"),
        ('B=b\nA=a${B:+"-"}$B', "a-b"),
        ("B=\nA=a${B:+-}$B", "a"),
        ("B=\nA=a${B+-}", "a-"),
        ("B=b\nC=c\nA=${B:+$C/}d", "c/d"),
        ("A=${B:+-}", "${B:+-}"),
        ("B=b\nA=${B:?give a B}", "b"),
    ],
)
def test_values_that_the_shell_would_compute(text: str, value: str) -> None:
    assert read(f"{text}\nARGS=(key=$A)").words == [f"key={value}"]


@pytest.mark.parametrize(
    "word",
    ["$(cat a b)", "`nproc --all`", "$(seq 1 0 5)", "$(seq 1 2 3 4)", "$(seq 0.5 2)", "$(seq)", "x$(f $(g (h)))"],
)
def test_what_another_program_prints_is_told(word: str) -> None:
    command = read(f"ARGS=(--a {word} --b 2)")
    assert command.words == ["--a", word, "--b", "2"]
    assert command.unknown == [word]


def test_a_number_of_seq_that_only_the_shell_knows() -> None:
    assert read("ARGS=($(seq 1 $N) --b)").unknown == ["N", "$(seq 1 $N)"]


@pytest.mark.parametrize(
    "line",
    [
        'if [ "$X" = 1 ]; then\n  ARGS+=(--b 2)\nfi',
        'if [ "$X" = 1 ]\nthen\nARGS+=(--b\n 2)\nfi',
        'if [ "$X" = 1 ]; then\n  echo 1\nelif [ "$X" = 2 ]; then\n  echo 2\nelse\n  ARGS+=(--b 2)\nfi',
        'if [ "$X" = 1 ]; then ARGS+=(--b 2); fi',
        'if [ "$X" = 1 ]; then echo 1; else ARGS+=(--b 2); fi',
        '[ "$X" = 1 ] && ARGS+=(--b 2)  # not always',
        'test "$X" = 1 || ARGS+=(--b 2)',
        "case $X in\n  1) ARGS+=(--b 2) ;;\nesac",
        "case $X in\n  1)\n    ARGS+=(--b 2)\n    ;;\nesac",
        "for i in 1; do\n  ARGS+=(--b 2)\ndone",
    ],
)
def test_what_a_condition_decides_is_taken_and_told(line: str) -> None:
    command = read(f"ARGS=(--a 1)\n{line}\nARGS+=(--c 3)")
    assert command.words == ["--a", "1", "--b", "2", "--c", "3"]
    assert command.conditional == ["ARGS"]


@pytest.mark.parametrize(
    "script",
    [
        "if true; then\n  echo 1\nfi\nARGS=(--a)\n",
        "if true; then echo 1; elif false; then echo 2; fi\nARGS=(--a)",
        "if true; then\n  N=1; fi\nARGS=(--a)",
        "for i in 1; do\n  N=1; M=2; done\nARGS=(--a)",
        "case x in\n  a) N=1;; b) N=2;; esac\nARGS=(--a)",
        "main() {\n  ARGS=(--a)\n}",
        "if true; then\n  ARGS=(--b)\nfi\nARGS=(--a)",
        "python3 - <<PY\nfor x in y:\n    print(x)\nPY\nARGS=(--a)",
    ],
)
def test_what_no_condition_decides_is_not_told(script: str) -> None:
    command = read(script)
    assert (command.words, command.conditional) == (["--a"], [])


@pytest.mark.parametrize(
    "line",
    [
        'if [ "$X" = 1 ]; then N=2; fi',
        'if [ "$X" = 1 ]; then N=1; else N=2; fi  # one of them',
        '[ "$X" = 1 ] && N="2"',
        'test "$X" = 1 || N=2;',
        "case $X in\n  1) N=2 ;;\nesac",
        "for i in 1; do N=$((i + 1)); done\nN=$((1+1))",
    ],
)
def test_a_value_that_a_condition_changes_is_told(line: str) -> None:
    command = read(f"N=0\n{line}\nARGS=(--a $N)\nARGS+=(--c 3)")
    assert command.words == ["--a", "2", "--c", "3"]
    assert (command.repeated, command.conditional) == (["N"], [])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('A="--x 1"\nA="$A --y 2"\nARGS=($A)', ["--x", "1", "--y", "2"]),
        ('A="--x 1"\nA="--y 2 ${A}"\nARGS=($A)', ["--y", "2", "--x", "1"]),
        ('A="a.b=1"\nB="c.d=2 e.f=3"\nA="$A $B"\nARGS=($A)', ["a.b=1", "c.d=2", "e.f=3"]),
        ('A="a.b=1"\nB="c.d=2"\nA="$A $B"\nA="$A e.f=3"\nARGS=($A)', ["a.b=1", "c.d=2", "e.f=3"]),
        ('A="x y"\nA="$A z"\nARGS=(--n "$A")', ["--n", "x y z"]),
        ("N=a\nN=$N/b\nARGS=(--n $N)", ["--n", "a/b"]),
        ("N=1\nN=${N:-2}\nARGS=(--n $N)", ["--n", "1"]),
        ("ARGS=(--x)\nARGS=(${ARGS[@]} --y)", ["--x", "--y"]),
        ('D=d\nD="${D}/y" make < a\nARGS=(--n $D/x)', ["--n", "d/x"]),
    ],
)
def test_a_variable_that_is_extended_by_itself(script: str, words: list[str]) -> None:
    command = read(script)
    assert command.words == words
    assert command.unknown == command.repeated == command.conditional == []


def test_a_variable_that_a_condition_extends_by_itself_is_told() -> None:
    command = read('A="--x 1"\nif true; then\n  A="$A --y 2"\nfi\nARGS=($A)')
    assert (command.words, command.conditional) == (["--x", "1", "--y", "2"], ["A"])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('A="\n   a.b=1 \\\n   c.d=2\n   e.f=3"\nARGS=($A)', ["a.b=1", "c.d=2", "e.f=3"]),
        ("A='\n  --x 1\n  --y \"2 3\"'\nARGS=($A)", ["--x", "1", "--y", "2 3"]),
        ('A="{\n \\"ARGS=(no)\\": 1\n}"\nARGS=(--n "$A")', ["--n", '{\n "ARGS=(no)": 1\n}']),
        ("A=5  # it's\nB='x' # \"\nARGS=(--a $A --b $B)", ["--a", "5", "--b", "x"]),
        ('A="open\nARGS=(--b 2)', ["--b", "2"]),
    ],
)
def test_a_text_of_several_lines(script: str, words: list[str]) -> None:
    command = read(script)
    assert (command.words, command.unknown) == (words, [])


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("cd a && N=1 make", "0"),
        ("N=1 make -j 8", "0"),
        ("N= read -r a", "0"),
        ("N=1 > a.log", "1"),
        ('echo "a; N=1"', "0"),
        ("true; N=1 make && echo", "0"),
        ("make; N=1", "1"),
    ],
)
def test_an_assignment_for_one_command_is_not_kept(line: str, value: str) -> None:
    assert read(f"N=0\n{line}\nARGS=(--a $N)").words == ["--a", value]


def test_a_variable_with_a_value_per_branch_is_told_once() -> None:
    command = read("if true; then\n  N=1\nelse\n  N=2\nfi\nARGS=(--a $N)")
    assert (command.words, command.repeated, command.conditional) == (["--a", "2"], ["N"], [])


@pytest.mark.parametrize("rest", ["2>&1 | tee a.log", "> a.log", "|| exit 1", "&& echo 1", "; echo 1", "&"])
def test_the_words_of_a_command_end_with_it(rest: str) -> None:
    command = find_command(
        f"python3 train.py --a '|' \"x > $(date)\" b;c {rest}\n", ["train.py"], Path("no_such_folder")
    )
    assert command.words == ["--a", "|", "x > $(date)", "b;c"]


@pytest.mark.parametrize(
    ("rest", "words", "joined"),
    [
        ("\n   ${A[@]} \\\n   --c 2", ["--b", "1", "--c", "2"], ["${A[@]}"]),
        ('  # a word\n   "${A[@]}"\n   --c 2 > a.log', ["--b", "1", "--c", "2"], ["${A[@]}", "--c"]),
        (" \\\n   --c 2", ["--c", "2"], []),
        ("\n${A[@]}", [], []),
        ("\n   b=1", [], []),
        ("\n   +c.d=1", ["+c.d=1"], ["+c.d=1"]),
    ],
)
def test_lines_that_lack_a_backslash(rest: str, words: list[str], joined: list[str]) -> None:
    command = find_command(f"A=(--b 1)\npython3 train.py --a{rest}\n", ["train.py"], Path("no_such_folder"))
    assert (command.words, command.joined) == (["--a", *words], joined)


@pytest.mark.parametrize("program", ['"${DIR}/train.py"', "'/a/train.py'", '"$DIR"/train.py', '"train.py"', "train.py"])
def test_a_program_may_be_quoted(program: str) -> None:
    text = f'python3 {program} --a 1\necho "done: train.py"\necho "see /a/train.py" --b\n'
    assert find_command(text, ["train.py"], Path("no_such_folder")).words == ["--a", "1"]


def test_words_that_are_read_from_a_variable() -> None:
    command = read('LINE="--a 1"\nread -ra ARGS <<< "${LINE}"')
    assert (command.words, command.unknown) == (["--a", "1"], [])
    assert read('read -ra ARGS <<< "$(tr a b < c)"').unknown == ["ARGS"]


@pytest.mark.parametrize(
    "path", ["/root/slime/scripts/models/tiny.sh", "scripts/models/tiny.sh", "../scripts/models/tiny.sh"]
)
def test_a_file_elsewhere_in_the_checkout(path: str, tmp_path: Path) -> None:
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "scripts" / "models" / "tiny.sh").write_text("ARGS=(--a)\n")
    (tmp_path / "tiny.sh").write_text("ARGS=(--b)\n")  # the name alone is not enough
    folder = tmp_path / "examples" / "one"
    folder.mkdir(parents=True)
    command = find_command(f"source {path}\npython3 train.py ${{ARGS[@]}}\n", ["train.py"], folder)
    assert (command.words, command.missing) == (["--a"], [])
    assert find_command("source /x/tiny.sh\npython3 train.py\n", ["train.py"], folder).missing == ["/x/tiny.sh"]


@pytest.mark.parametrize("path", ['"$(dirname "$0")/models/tiny.sh"', '"${HERE}/models/tiny.sh" || exit 1'])
def test_a_file_next_to_the_script(path: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text("ARGS=(--a)\n")
    command = find_command(f"source {path}\npython3 train.py ${{ARGS[@]}}\n", ["train.py"], tmp_path)
    assert (command.words, command.missing) == (["--a"], [])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('L=$(basename "$A")\nARGS=(--a $L)', ["--a", "c.d"]),
        ('ARGS=(--a "$(dirname $A)/x")', ["--a", "a/b/x"]),
        ("A=$(pwd)\nARGS=(--a $A/m --b `pwd` --c ${PWD}/n)", ["--a", "./m", "--b", ".", "--c", "./n"]),
        ("B=x\nARGS=(--a $B$(basename u/v))", ["--a", "xv"]),
        ("G=0,1,2\nN=$(echo \"$G\" | tr ',' '\\n' | wc -l)\nARGS=(--a $N)", ["--a", "3"]),
        ('ARGS=(--a)\nARGS+=("$@" "${@:2}")', ["--a"]),
        ("M=$A; shift\nARGS=(--a $M)", ["--a", "a/b/c.d"]),
        ("M='x y;' && echo\nARGS=(--a \"$M\")", ["--a", "x y;"]),
        ("M=1 && N=2\nARGS=(--a $M --b $N)", ["--a", "1", "--b", "2"]),
        ("export M=1 N='2 3'\nARGS=(--a $M --b \"$N\")", ["--a", "1", "--b", "2 3"]),
        ("M=1; O=$(nproc)\nARGS=(--a $M)", ["--a", "1"]),
        ('E="a.b=1 +c=[2,3]"\nARGS=($E)', ["a.b=1", "+c=[2,3]"]),
    ],
)
def test_what_small_programs_print_is_worked_out(script: str, words: list[str]) -> None:
    command = read(f"A=a/b/c.d\n{script}")
    assert command.words == words
    assert command.unknown == command.dated == []


def test_a_date_is_that_of_now_and_is_told() -> None:
    command = read("NOW=$(date +%Y%m%d_%H)\nARGS=(--a run-$NOW)")
    assert re.fullmatch(r"run-2\d{7}_\d\d", command.words[1])
    assert (command.unknown, command.dated) == ([], ["NOW"])


@pytest.mark.parametrize(
    ("script", "unknown"),
    [
        ('run() {\n  ARGS=(--a "$@")\n}\nrun --b', "ARGUMENTS_OF_A_FUNCTION"),
        ('function run {\n  ARGS=(--a "${@:2}")\n}\nrun --b', "ARGUMENTS_OF_A_FUNCTION"),
        ('set -- --b\nARGS=(--a "$@")', "ARGUMENTS_OF_A_FUNCTION"),
        ('cd "$(dirname "$0")"\nARGS=(--a $(pwd)/m)', "PWD"),
        ("A=x/\nARGS=(--a ${A%/})", "${A%/}"),
        ("ARGS=(--a ${A:-x y})", "${A:-x"),
        ("ARGS=(--a '${trainer.name}')", "${trainer.name}"),
        ('ARGS=(--a "$@ and more")', "$@"),
        ("ARGS=(--a $(date +%s%N))", "$(date +%s%N)"),
    ],
)
def test_what_is_not_worked_out_is_told(script: str, unknown: str) -> None:
    assert read(script).unknown == [unknown]


@pytest.mark.parametrize("script", ["log() { echo $@; }", "log() {\n  echo $@\n}"])
def test_arguments_after_a_function_are_those_of_the_script(script: str) -> None:
    assert read(f'{script}\nARGS=(--a "$@")').unknown == []


@pytest.mark.parametrize(
    "script", ["A=$(basename $UNKNOWN)", "A=$(echo $UNKNOWN | tr , '\\n' | wc -l)", "A=$(hostname)"]
)
def test_a_program_with_unknown_words_prints_what_is_unknown(script: str) -> None:
    command = read(f"{script}\nARGS=(--a $A)")
    assert command.words[1].startswith("$")
    assert command.unknown


def test_variables_from_outside() -> None:
    script = "B=${B:-2}\nC=$(nproc)\nD=4\nARGS=(--a $A/x --b $B --c $C --d $D --mode $1)"
    assert read("cd x\nARGS=(--a $(pwd)/m $MORE)", PWD="/d", MORE="--b 1").words == ["--a", "/d/m", "--b", "1"]
    command = read(script, A="/models", B="3", C="8", **{"1": "p2p"})
    assert command.words == ["--a", "/models/x", "--b", "3", "--c", "8", "--d", "4", "--mode", "p2p"]
    assert command.unknown == []


@pytest.mark.parametrize(
    "script",
    [
        'if [ "$X" = 1 ]; then\n  N=1\nelse\n  N=2\nfi',
        'N=1\nif [ "$X" = 1 ]; then\n  N=2\nfi',
        'if [ -z "$N" ]; then\n  N=1\nfi',
        "case $X in\n  a)\n    N=1\n    ;;\nesac",
        "for i in 1 2; do\n  N=$i\ndone",
        'if [ "$X" = 1 ]; then\n  N=$(nproc)\nfi',
        'if [ "$X" = 1 ]; then N=(1); else N=(2); fi',
        'N=0\n[ -z "$N" ] && N=1',
        'N=""  # yours',
        "export N=",
    ],
)
def test_a_value_that_is_given_decides_the_condition(script: str) -> None:
    command = read(f"{script}\nM=$N/2\nARGS=(--n $N --m $M)", N="7")
    assert command.words == ["--n", "7", "--m", "7/2"]
    assert command.unknown == command.repeated == command.conditional == []


def test_a_value_that_is_given_for_an_array_is_split() -> None:
    script = "if true; then\n  MORE=(--a 1)\nelse\n  MORE=(--b 2)\nfi\nARGS=(--c ${MORE[@]})"
    assert read(script, MORE="--a 1").words == ["--c", "--a", "1"]
    assert read(script).words == ["--c", "--b", "2"]


@pytest.mark.parametrize(
    ("value", "words"),
    [("x-$N", ["x-7"]), ("${N:-1}", ["7"]), ("(${N[@]} --b)", ["7", "--b"])],
)
def test_a_value_that_a_condition_extends_is_the_one_from_outside(value: str, words: list[str]) -> None:
    assert read(f"if true; then\n  N={value}\nfi\nARGS=(--a ${{N[@]}})", N="7").words == ["--a", *words]


def test_an_assignment_after_the_condition_wins() -> None:
    with pytest.raises(ConfigurationError, match=r"N has no effect: .* the script sets it itself, under no condition"):
        read("if true; then\n  N=1\nfi\nN=2\nARGS=(--n $N)", N="7")


@pytest.mark.parametrize("name", ["NO_SUCH", "D"])
def test_a_variable_from_outside_that_changes_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} has no effect"):
        read("D=4\nARGS=(--d $D)", **{name: "5"})


def test_an_array_that_nothing_fills_is_empty() -> None:
    assert (read("OTHER=1").words, read("OTHER=1").unknown) == ([], [])
    assert read("source gone.sh").unknown == ["ARGS"]


def test_a_default_replaces_a_text_that_the_script_left_empty():
    script = "A=${1:-}\nA=${A:-a}\nB=''\nB=${B:-b}\nC=c\nC=${C:-d}\nD=${D:-}\nD=${D:-e}\npython train.py $A $B $C $D"
    assert find_command(script, ["train.py"], Path()).words == ["a", "b", "c", "e"]
    assert find_command(script, ["train.py"], Path(), {"1": "x", "D": "y"}).words == ["x", "b", "c", "y"]
