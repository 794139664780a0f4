#!/usr/bin/env bash
# `make demo` on a bare Debian, in a folder that debootstrap makes: what a message names is installed, and nothing else.
#     bash tests/bare_machine.sh [SUITE [MIRROR [COMMAND ...]]]    the commands run after the demo, such as "make test"
# Needs root, debootstrap, PyPI and 12 GB in TMPDIR. The caller's settings of pip, proxies and certificates hold there.
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive
cd "$(dirname "$0")/.."
root=$(mktemp -d --tmpdir bare-XXXXXX)
trap 'rm -rf --one-file-system "$root"' EXIT

debootstrap --variant=minbase "${1:-trixie}" "$root" ${2:-}
mkdir "$root/grpo"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$root/grpo"

run() {  # a command in the checkout under $root; its mounts end with it
    echo "\$ $1"
    for place in /etc/pip.conf ${PIP_CERT:-} ${PIP_FIND_LINKS:-} ${SSL_CERT_FILE:-} ${REQUESTS_CA_BUNDLE:-}; do
        [[ ! -e $place ]] || cp -rL --parents "$place" "$root"  # each time: packages bring certificates of their own
    done
    unshare --mount sh -ec 'for f in dev proc sys; do mount --rbind /$f "$0/$f"; done; exec chroot "$0" sh -c "cd /grpo; $1"' "$root" "$1"
}

run "apt-get update && apt-get install -y make"  # which says the rest
command="make demo" followed="apt-get install make"
until run "$command" 2>&1 | tee "$root/said"; do
    remedy=$(grep -oE 'apt-get install [a-z0-9.+ -]+|TORCH=[^ ]+' "$root/said" | tail -1 || true)
    if [[ -z $remedy || $followed == *"$remedy"* ]]; then
        echo "error: the last message names no remedy, or one that did not help" >&2
        exit 1
    fi
    followed+=$'\n'$remedy
    case $remedy in
        TORCH=*) command+=" $remedy" ;;
        *) run "${remedy/install/install -y}" ;;
    esac
done

grep -o '"reward/mean": *[0-9.]*' "$root/grpo/outputs/tiny/metrics.jsonl" | tail -n 10 |
    awk '{ sum += $2 } END { print "mean reward of the last ten steps:", sum / NR; exit sum / NR < 0.9 }'
for package in $(grep apt-get <<<"$followed" | cut -d " " -f 3-); do
    grep -qE "apt-get install [^\`]*\b$package\b" README.md || { echo "error: README.md does not name $package" >&2; exit 1; }
done
for command in "${@:3}"; do
    run "$command"
done
