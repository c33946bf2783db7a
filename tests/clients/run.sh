#!/usr/bin/env bash
# Real clients against `specrs serve` on loopback, each in an environment of its own:
#
#   tests/clients/run.sh [NAME ...]      of: openai openai2 agents langchain instructor lm_eval guidellm ray; all of them
#   tests/clients/run.sh --prepare NAME  makes the environment and prints its Python
#
# PYTHON (.venv's, else python3) has specrs and what it needs; clients see those packages behind their own, so that torch
# is not installed again. Environments lie in CLIENTS_CACHE (~/.cache/specrs-clients) and are made again where what they
# need has changed. With RECORD set, versions and outcomes go to benches/results/serve_clients.json. Exits with the number
# of clients that failed.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/tests/clients
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
cache=${CLIENTS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/specrs-clients}
export PYTHONPATH=$root/python${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 SPECRS_DEVICE=${SPECRS_DEVICE:-cpu}
names=(openai openai2 agents langchain instructor lm_eval guidellm ray)

# What each installs, and whether it sees PYTHON's packages behind its own: `shares`, or `alone`.
declare -A needs=(
    [openai]="alone openai>=3" # the newest
    [openai2]="alone openai>=2,<3"
    [agents]="alone openai-agents>=0.20"
    [langchain]="alone langchain-openai>=1"
    [instructor]="alone instructor>=1"
    [lm_eval]="shares lm-eval[api]>=0.4.9"
    [guidellm]="shares guidellm>=0.8"
    [ray]="shares ray[serve]>=2.50 httpx"
)

# prepare NAME: the Python of its environment, on stdout; what pip says goes to stderr.
prepare() {
    local name=$1 place=$cache/$1 mode=${needs[$1]%% *} wants=${needs[$1]#* }
    local mark="$wants of $("$python" -c 'import sys; print(sys.version, sys.prefix)')"
    if [ "$(cat "$place/ready" 2>/dev/null)" != "$mark" ]; then
        rm -rf "$place"
        mkdir -p "$cache"
        "$python" -m venv "$place" >&2 || return 1
        if [ "$mode" = shares ]; then # a line of a .pth is one more place to look, behind the environment's own
            "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
                >"$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
        fi
        read -ra wanted <<<"$wants"
        "$place/bin/python" -m pip install --quiet --disable-pip-version-check "${wanted[@]}" >&2 || return 1
        printf '%s' "$mark" >"$place/ready"
    fi
    echo "$place/bin/python"
}

if [ "${1:-}" = --prepare ]; then
    prepare "$2"
    exit
fi
[ $# -eq 0 ] || names=("$@")
for name in "${names[@]}"; do
    [ -n "${needs[$name]:-}" ] || { echo "no client $name; there are ${!needs[*]}" >&2; exit 2; }
done

work=$(mktemp -d)
server=
finish() {
    [ -z "$server" ] || kill -TERM "$server" 2>/dev/null
    rm -rf "$work"
}
trap finish EXIT

# What the clients must get, from `LLM` itself; and the model with a chat template, which is what is served.
"$python" "$here/expect.py" "$work" || exit 99
"$python" -m specrs serve "$work/model" --draft "$work/draft" --served-model-name tiny --port 0 \
    >"$work/out" 2>"$work/log" &
server=$!
for _ in $(seq 600); do
    url=$(sed -n 's/^listening on \(http:.*\)$/\1/p' "$work/log")
    [ -n "$url" ] && break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.2
done
[ -n "$url" ] || { echo "the server did not start:" >&2; cat "$work/log" >&2; exit 99; }
export BASE_URL=$url/v1 OPENAI_API_KEY=none EXPECT=$work/expect.json MODEL_DIR=$work/model DRAFT_DIR=$work/draft WORK=$work

failed=0
runs=()
for name in "${names[@]}"; do
    began=$SECONDS passed=0
    if client=$(prepare "$name") &&
        timeout "${STEP_LIMIT:-900}" "$client" "$here/client_${name%2}.py" | tee "$work/$name.said"; then
        echo "$name: passed in $((SECONDS - began)) s"
        passed=1
    else
        echo "$name: FAILED"
        failed=$((failed + 1))
    fi
    runs+=("$name:$((SECONDS - began)):$passed")
done
[ -z "${RECORD:-}" ] || "$python" "$here/record.py" "$work" "${runs[@]}"
kill -TERM "$server"
wait "$server"
status=$?
server=
[ "$status" = 0 ] || { echo "the server ended with $status:" >&2; tail -n 20 "$work/log" >&2; failed=$((failed + 1)); }
echo "${#names[@]} clients, $failed failed"
exit "$failed"
