# bash completion for torchrun: source <(torchrun --print-completion bash)
IFS= read -r -d '' _torchrun_flags <<'END'
@FLAGS@END
_torchrun() {
    local IFS=$'\n' words=() glued='' flag='' script='' word current i
    local flags=$'\n'$_torchrun_flags
    COMPREPLY=()
    # bash splits words at "=" and ":" as well; they are put together again first.
    for ((i = 1; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if ((${#words[@]} > 0)) && [[ -n $glued || $word == [=:]* ]]; then
            words[${#words[@]} - 1]+=$word
        else
            words+=("$word")
        fi
        glued=''
        [[ $word == *[=:] ]] && glued=1
    done
    current=${words[${#words[@]} - 1]}
    # Only the flags before the script are torchrun's.
    for ((i = 0; i < ${#words[@]} - 1; i++)); do
        word=${words[i]}
        if [[ -n $flag ]]; then
            flag=''
        elif [[ $word == -- || $word != -* ]]; then
            script=1
            break
        elif [[ $flags == *$'\n'"${word//_/-}="$'\t'* ]]; then
            flag=$word
        fi
    done
    if [[ -z $script && -z $flag && $current == --*=* ]]; then
        flag=${current%%=*}
        current=${current#*=}
        current=${current##*:}
    fi
    if [[ -n $flag ]]; then
        word=${flags#*$'\n'"${flag//_/-}="$'\t'}
        word=${word%%$'\t'*}
        case $word in
        @nothing | '') ;;
        @files) COMPREPLY=($(compgen -f -- "$current")) ;;
        @folders) COMPREPLY=($(compgen -d -- "$current")) ;;
        @hosts) COMPREPLY=($(compgen -A hostname -- "$current")) ;;
        *) COMPREPLY=($(compgen -W "${word// /$'\n'}" -- "$current")) ;;
        esac
    elif [[ -z $script && $current == -* ]]; then
        COMPREPLY=($(compgen -W "$(cut -f 1 <<<"$_torchrun_flags")" -- "${current//_/-}"))
        [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
    else
        COMPREPLY=($(compgen -f -- "$current"))
        compopt -o filenames 2>/dev/null
    fi
    return 0
}
complete -F _torchrun torchrun
