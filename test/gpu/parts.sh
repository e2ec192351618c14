# What the programs of this folder share: parts that pass, fail or cannot be run, and the report of them. Sourced.

# Whether there is one is asked without the driver's help where there is none.
gpus() {
    nvidia-smi -L 2>/dev/null | grep '^GPU' || ls /dev/nvidia[0-9]* 2>/dev/null
}

# open_report FOLDER SECONDS: report.md and log.txt in the folder, and the time for all parts from here on.
open_report() {
    mkdir -p "$1" || exit 2
    out="$(cd "$1" && pwd)"
    limit="$2"
    report="$out/report.md"
    parts="$(mktemp -d)" || exit 2
    trap 'rm -rf "$parts"' EXIT
    passed=0 failed=0 absent=0
    : >"$report" && : >"$out/log.txt" || exit 2
}

say() {
    printf '%s\n' "$*" | tee -a "$report"
}

# The seconds that a part may take: its own, or what is left of all.
seconds() {
    local left=$((limit - SECONDS))
    echo $((left < $1 ? left : $1))
}

# A part that cannot be run says why.
skip() {
    absent=$((absent + 1))
    say "- not run: $1: $2"
}

# part NAME SECONDS COMMAND...: its output is in a log; what failed is shown.
part() {
    local name="$1" own="$2"
    shift 2
    begin_part "$name" "$own" "$@"
    end_part "$name"
}

# Runs it, and keeps what it prints, and in NAME.end its status, the seconds that it took, and those that it was given.
begin_part() {
    local name="$1" allowed started=$SECONDS status=0
    allowed=$(seconds "$2")
    shift 2
    printf '%s' "$*" >"$parts/$name.command"
    : >"$parts/$name"
    if [ "$allowed" -gt 0 ]; then
        timeout -k 5 "$allowed" "$@" >"$parts/$name" 2>&1 </dev/null || status=$?
    fi
    echo "$status $((SECONDS - started)) $allowed" >"$parts/$name.end"
}

end_part() {
    local name="$1" status took allowed counts
    read -r status took allowed <"$parts/$name.end"
    { printf '\n== %s: %s\n' "$name" "$(cat "$parts/$name.command")" && cat "$parts/$name"; } >>"$out/log.txt"
    # Of minitest.
    counts="$(grep -E '^[0-9]+ runs, [0-9]+ assertions, ' "$parts/$name" | tail -1)"
    if [ "$allowed" -le 0 ]; then
        failed=$((failed + 1))
        say "- FAILED: $name: the $limit s for all parts were over before it began"
        return 1
    fi
    case $status in
    0)
        if [ -n "$counts" ] && [ "${counts%% *}" -gt 0 ] && [[ "$counts" = *" ${counts%% *} skips" ]]; then
            skip "$name" "$(sed -n 's/^skipped: [^ ]* //p' "$parts/$name" | head -1)"
        else
            passed=$((passed + 1))
            say "- passed: $name, $took s${counts:+: $counts}"
            grep '^skipped: ' "$parts/$name" | sed 's/^/      /' | tee -a "$report"
        fi
        ;;
    77) skip "$name" "$(grep -v '^skip\|^[0-9]* tests' "$parts/$name" | head -1)" ;;
    *)
        failed=$((failed + 1))
        [ "$status" -eq 124 ] && say "- FAILED: $name: more than its $allowed s" || say "- FAILED: $name: exit status $status, $took s"
        tail -40 "$parts/$name" | sed 's/^/      /' | tee -a "$report"
        ;;
    esac
    return "$status"
}

# test/ruby/gpu_hooks_test.rb is the part ruby-hooks.
ruby_part() {
    basename "$1" .rb | sed 's/^gpu_//; s/_test$//; s/^/ruby-/'
}

# ruby_parts SECONDS FILE...: each file of tests is a part, some of them side by side. RUBY is the command that runs Ruby.
ruby_parts() {
    local own="$1" file files jobs=$((($(nproc) + 1) / 2))
    shift
    # Each has processes of its own on the GPU.
    [ "$jobs" -gt 4 ] && jobs=4
    # Large files tend to take long; begun last, they would be waited for alone.
    mapfile -t files < <(ls -S -- "$@")
    for file in "${files[@]}"; do
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do
            wait -n
        done
        begin_part "$(ruby_part "$file")" "$own" "${RUBY[@]}" test/run.rb "$file" --verbose &
    done
    wait
    for file in "$@"; do
        end_part "$(ruby_part "$file")"
    done
}

# Of the Pythons that there are, one with a torch for CUDA, else one with a torch, else any: $python, and what it knows.
find_python() {
    local facts='' best=-1 candidate found rank candidates=("${PYTHON:-python3}")
    python=
    [ -z "${PYTHON:-}" ] && candidates+=(/usr/bin/python3)
    for candidate in "${candidates[@]}"; do
        found="$(timeout 60 "$candidate" test/gpu/machine.py 2>/dev/null)" || continue
        rank=0
        case "$found" in *torch_cuda=[1-9]*) rank=2 ;; *torch_version=*) rank=1 ;; esac
        [ $rank -gt $best ] && best=$rank python="$candidate" facts="$found"
    done
    python_version='' torch_version='' torch_cuda='' torch_abi='' torch_prefix='' gpu='' gpu_count='' torch_lacks='' torch_lacks_gpu=''
    wheel_cudart='' wheel_nccl=''
    eval "$facts"
}

# The libraries of torch's wheels, so that all that runs uses the same; else what the loader finds.
use_wheel_libraries() {
    [ -z "${TDDP_CUDART_LIBRARY:-}" ] && [ -n "$wheel_cudart" ] && export TDDP_CUDART_LIBRARY="$wheel_cudart"
    [ -z "${TDDP_NCCL_LIBRARY:-}" ] && [ -n "$wheel_nccl" ] && export TDDP_NCCL_LIBRARY="$wheel_nccl"
    [ -d /usr/local/cuda/lib64 ] && export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64"
    say "- libraries: ${TDDP_CUDART_LIBRARY:-libcudart by name}, ${TDDP_NCCL_LIBRARY:-libnccl.so.2 by name}"
}

say_machine() {
    say "- date: $(date -u '+%F %R UTC')"
    say "- system: $(uname -sr), $(uname -m), $(nproc) processors, $(${CC:-cc} --version 2>/dev/null | head -1), $(cmake --version 2>/dev/null | head -1 || true)"
    [ -z "${stand_ins:-}" ] && say "- GPU: ${gpu_count:+$gpu_count × }${gpu:-$(gpus | head -1)}, driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1 || true)"
    say "- Python: ${python_version:-none}; torch ${torch_version:-none}${torch_cuda:+ for CUDA $torch_cuda}${torch_lacks:+ ($torch_lacks)}${torch_lacks_gpu:+ ($torch_lacks_gpu)}"
}
