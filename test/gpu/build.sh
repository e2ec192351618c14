# Builds what the programs of this folder run, into the folder $1; sourced by them. With cmake, else with the compilers alone.

# The shim is built too where a libtorch with headers is at $2; $3 is the ABI of its C++ library. The gloo backend, where an
# installed Gloo is at $4.
build_with_cmake() {
    local folder="$1" torch="$2" abi="$3" gloo="${4:-}" settings=(-DCMAKE_BUILD_TYPE=RelWithDebInfo -DTDDP_TESTS=ON)
    if [ -n "$gloo" ]; then
        settings+=(-DTDDP_GLOO=ON "-DCMAKE_PREFIX_PATH=$gloo")
    else
        settings+=(-DTDDP_GLOO=OFF)
    fi
    if [ -n "$torch" ]; then
        settings+=(-DTDDP_TORCH=ON "-DTDDP_LIBTORCH=$torch" "-DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=$abi")
    else
        settings+=(-DTDDP_TORCH=OFF)
    fi
    cmake -S . -B "$folder" "${settings[@]}" && cmake --build "$folder" -j "$(nproc)" --target gpu
}

# The parts in C alone, of the rooms that CMakeLists.txt lists.
build_with_cc() {
    local folder="$1" objects="$1/objects" cc="${CC:-cc}" source sources=()
    local flags="-std=c11 -D_GNU_SOURCE -O2 -g -fPIC -fvisibility=hidden -pthread -Iinclude -Isrc -Itest/c"
    local rooms room
    read -r -a rooms <<<"$(tr '\n' ' ' <CMakeLists.txt | grep -o ' tddp_room([a-z]* [^)]*)' | sed 's/^ tddp_room([a-z]* \(.*\))$/\1/' | tr '\n' ' ')"
    mkdir -p "$objects" "$folder/lib" "$folder/test"
    for room in "${rooms[@]}"; do
        sources+=("src/$room"/*.c)
    done
    export cc flags objects
    # shellcheck disable=SC2016
    printf '%s\n' "${sources[@]}" | xargs -P "$(nproc)" -I '{}' sh -c '
        case "$1" in
        */arith/set_avx2.c) more="-O3 -ffp-contract=off -mavx2 -mf16c" ;;
        */arith/set_avx512.c) more="-O3 -ffp-contract=off -mavx512f -mavx512bw -mavx512vl -mavx512dq" ;;
        */arith/set_baseline.c | */arith/complex.c) more="-O3 -ffp-contract=off" ;;
        *) more= ;;
        esac
        case "$more $(uname -m)" in
        *-mavx*x86_64 | *" x86_64") ;;
        *) more= ;;
        esac
        exec $cc $flags $more -c "$1" -o "$objects/$(echo "$1" | tr / _).o"' sh '{}' || return 1
    "$cc" -shared -pthread -Wl,-soname,libtddp.so -o "$folder/lib/libtddp.so" "$objects"/*.o -ldl -lm || return 1
    local link="-L$folder/lib -ltddp -ldl -lm -Wl,-rpath,$(cd "$folder/lib" && pwd)"
    # The flags are many words.
    # shellcheck disable=SC2086
    {
        # The sources of src/backend/nccl/CMakeLists.txt: what misses one isn't linked.
        $cc $flags -shared -Wl,-z,defs -o "$folder/lib/tddp_backend_nccl.so" src/backend/nccl/*.c src/backend/cuda/library.c \
            src/backend/blocking.c src/base/{clock,thread}.c $link &&
            $cc $flags -shared -o "$folder/lib/libstandin_cudart.so" test/c/standin/cudart*.c $link &&
            $cc $flags -shared -o "$folder/lib/libstandin_nccl.so" test/c/standin/nccl*.c "$folder/lib/libstandin_cudart.so" $link &&
            $cc $flags -o "$folder/test/gpu_bench" test/gpu/bench.c $link || return 1
        for source in test/gpu/*_test.c; do
            $cc $flags -o "$folder/test/gpu_$(basename "$source" _test.c)" "$source" test/c/*.c $link || return 1
        done
    }
}

build() {
    if cmake --version >/dev/null 2>&1; then
        build_with_cmake "$@"
    else
        build_with_cc "$@"
    fi
}
