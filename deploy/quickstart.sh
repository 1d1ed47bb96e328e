#!/usr/bin/env bash
# Installs, builds, gets the model and runs the main job: two workers and one kvstore answer questions about one document; the second
# question is answered by the other worker from the shared pool. --keep leaves the server running.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat <<'TXT'
Usage: bash deploy/quickstart.sh [--keep] [--port N]

Installs the packages, builds, gets the model, starts a server with two workers and one kvstore, and asks two questions
about deploy/demo/handbook.txt (some 5,000 tokens). Everything it starts ends with it.

  --keep     leave the server running until Ctrl-C
  --port N   port of the API (default 8080; 0 takes a free one)
TXT
}

keep=no port=8080
while [ $# -gt 0 ]; do
    case "$1" in
    --keep) keep=yes ;;
    --port) port=${2:?--port needs a number}; shift ;;
    --port=*) port=${1#*=} ;;
    -h | --help) usage; exit 0 ;;
    *) echo "quickstart: unknown argument: $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done

model=models/SmolLM2-135M-Instruct.Q4_1.gguf
document=deploy/demo/handbook.txt
step() { printf '\n==> %s\n' "$*"; }

step "Packages"
bash deploy/install-packages.sh
step "Build (Release)"
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build build -j "$(nproc)"
step "Model"
bash deploy/get-model.sh

run_dir=$(mktemp -d)
server=
cleanup() {
    local status=$?
    trap - EXIT INT TERM
    if [ -n "$server" ] && kill -0 "$server" 2>/dev/null; then
        kill -TERM "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
    [ "$status" -eq 0 ] || { echo "--- last lines of the server's log ---" >&2; tail -n 20 "$run_dir/server.log" >&2 || true; }
    rm -rf "$run_dir"
    exit "$status"
}
trap cleanup EXIT INT TERM

step "Server: one router, two workers, one kvstore"
build/bin/tidepool serve --model "$model" --workers 2 --port "$port" --port-file "$run_dir/port" 2>"$run_dir/server.log" &
server=$!
# The port file appears when the API answers.
for _ in $(seq 600); do
    [ -s "$run_dir/port" ] && break
    kill -0 "$server" 2>/dev/null || { echo "quickstart: the server ended; is port $port in use? (--port 0 takes a free one)" >&2; exit 1; }
    sleep 0.1
done
[ -s "$run_dir/port" ] || { echo "quickstart: the server did not answer within 60 s" >&2; exit 1; }
url=http://127.0.0.1:$(cat "$run_dir/port")
echo "serving at $url"

ask() { build/bin/tidepool chat --url "$url" --file "$document" --message "$1" --max-tokens 96 --temperature 0 --stats; }

step "First question: the document is read once (layer-major prefill), its KV goes to the pool"
echo "> What did Ines Halloran do at Carrow Point?"
ask "What did Ines Halloran do at Carrow Point?"

step "Second question, same document: the other worker answers from the pool"
echo "> Why must everyone walk back when the horn blows?"
ask "Why must everyone walk back when the horn blows?"

cat <<TXT

Done. To keep a server running:
  build/bin/tidepool serve --model $model --workers 2        (or: bash deploy/quickstart.sh --keep)
Talk to it with build/bin/tidepool chat, any OpenAI client, or:
  curl -s http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' -d '{"messages":[{"role":"user","content":"What is a tide pool?"}],"max_tokens":64}'
TXT
if [ "$keep" = yes ]; then
    echo
    echo "Serving at $url; Ctrl-C ends it."
    wait "$server" || true
    server=
fi
