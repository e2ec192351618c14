# fish completion for torchrun: torchrun --print-completion fish | source
set -g __torchrun_with_value
function __torchrun_before_script
    set -l words (commandline -opc)
    set -e words[1]
    set -l pending no
    for word in $words
        if test $pending = yes
            set pending no
        else if contains -- (string replace -a _ - -- $word) $__torchrun_with_value
            set pending yes
        else if test x$word = x--; or not string match -q -- '-*' $word
            return 1
        end
    end
    return 0
end
for row in (string split -n \n -- '@FLAGS_IN_QUOTES@')
    set -l parts (string split \t -- $row)
    set -l form (string trim -r -c = -- $parts[1])
    set -l arguments -c torchrun -n __torchrun_before_script -d $parts[3]
    if string match -q -- '--*' $form
        set -a arguments -l (string sub -s 3 -- $form)
    else
        set -a arguments -s (string sub -s 2 -- $form)
    end
    if test $form != $parts[1]
        set -ga __torchrun_with_value $form
        switch $parts[2]
            case @nothing
                set -a arguments -x
            case @files
                set -a arguments -r -F
            case @folders
                set -a arguments -x -a '(__fish_complete_directories)'
            case @hosts
                set -a arguments -x -a '(__fish_print_hostnames)'
            case '*'
                set -a arguments -x -a $parts[2]
        end
    end
    complete $arguments
end
