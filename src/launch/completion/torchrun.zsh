#compdef torchrun
# zsh completion for torchrun: source <(torchrun --print-completion zsh), or as _torchrun in a folder of $fpath
_torchrun() {
    local -a specs
    local form offer help
    while IFS=$'\t' read -r form offer help; do
        help=${${help//\[/\\[}//\]/\\]}
        case $offer in
        @nothing) offer=' ' ;;
        @files) offer=_files ;;
        @folders) offer='_files -/' ;;
        @hosts) offer=_hosts ;;
        *) offer="($offer)" ;;
        esac
        case $form in
        --*=) specs+=("${form}[$help]:value:$offer") ;;
        *=) specs+=("${form%=}+[$help]:value:$offer") ;;
        *) specs+=("${form}[$help]") ;;
        esac
    done <<'END'
@FLAGS@END
    _arguments -S $specs '1:script:_files' '*::argument:_files'
}
if [ "$funcstack[1]" = _torchrun ]; then
    _torchrun "$@"
else
    compdef _torchrun torchrun
fi
