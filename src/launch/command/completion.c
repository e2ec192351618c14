/*
 * --print-completion: what bash, zsh and fish need to complete torchrun's command line, made from
 * the table of flags. Only the flags before the script are torchrun's; after it files are offered.
 * One thread; writes to the stream alone.
 */
#include <string.h>

#include "launch/command/options.h"

/* --- parts ----------------------------------------------------------------------------------- */

static bool takes_value(const tddp_launch_flag *flag)
{
    return flag->value != NULL;
}

/* The help up to its first pause, since shells show one line. `escaped` get a backslash; a single
 * quote ends and reopens the quotes around it. */
static void print_summary(FILE *to, const tddp_launch_flag *flag, const char *escaped)
{
    for (const char *at = flag->help; *at != '\0' && *at != ';' && *at != ':'; at++) {
        if ((at[0] == '.' && at[1] == ' ') || (at[0] == ',' && strlen(at) > 40)) {
            break;
        }
        if (*at == '\'') {
            fputs("'\\''", to);
        } else {
            fprintf(to, "%s%c", strchr(escaped, *at) ? "\\" : "", *at);
        }
    }
}

/* All forms of a flag with `separator` between them, such as "-r|--redirects". */
static void print_forms(FILE *to, const tddp_launch_flag *flag, const char *separator)
{
    const char *before = "";
    if (flag->letter) {
        fprintf(to, "-%c", flag->letter);
        before = separator;
    }
    if (tddp_launch_flag_is_long(flag)) {
        fprintf(to, "%s--%s", before, flag->name);
    }
    if (flag->alias) {
        fprintf(to, "%s--%s", separator, flag->alias);
    }
}

static void print_forms_with_values(FILE *to, const char *separator)
{
    const char *before = "";
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        if (takes_value(&tddp_launch_flags[i])) {
            fputs(before, to);
            print_forms(to, &tddp_launch_flags[i], separator);
            before = separator;
        }
    }
}

/* --- bash ------------------------------------------------------------------------------------ */

/* bash splits words at "=" and ":" as well; they are put together again first. */
static const char bash_begin[] =
    "_torchrun() {\n"
    "    local IFS=$'\\n' words=() glued='' flag='' script='' word current i\n"
    "    COMPREPLY=()\n"
    "    for ((i = 1; i <= COMP_CWORD; i++)); do\n"
    "        word=${COMP_WORDS[i]}\n"
    "        if ((${#words[@]} > 0)) && [[ -n $glued || $word == [=:]* ]]; then\n"
    "            words[${#words[@]} - 1]+=$word\n"
    "        else\n"
    "            words+=(\"$word\")\n"
    "        fi\n"
    "        glued=''\n"
    "        [[ $word == *[=:] ]] && glued=1\n"
    "    done\n"
    "    current=${words[${#words[@]} - 1]}\n"
    "    for ((i = 0; i < ${#words[@]} - 1; i++)); do\n"
    "        word=${words[i]}\n"
    "        if [[ -n $flag ]]; then\n"
    "            flag=''\n"
    "            continue\n"
    "        fi\n"
    "        case ${word//_/-} in\n"
    "        --) script=1 ;;\n"
    "        ";
static const char bash_middle[] = ") flag=$word ;;\n"
                                  "        -*) ;;\n"
                                  "        *) script=1 ;;\n"
                                  "        esac\n"
                                  "        [[ -n $script ]] && break\n"
                                  "    done\n"
                                  "    if [[ -z $script && -z $flag && $current == --*=* ]]; then\n"
                                  "        flag=${current%%=*}\n"
                                  "        current=${current#*=}\n"
                                  "        current=${current##*:}\n"
                                  "    fi\n"
                                  "    case ${flag//_/-} in\n";
static const char bash_end[] =
    "    '')\n"
    "        if [[ -z $script && $current == -* ]]; then\n"
    "            COMPREPLY=($(compgen -W \"$(_torchrun_flags)\" -- \"${current//_/-}\"))\n"
    "            [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace "
    "2>/dev/null\n"
    "        else\n"
    "            COMPREPLY=($(compgen -f -- \"$current\"))\n"
    "            compopt -o filenames 2>/dev/null\n"
    "        fi\n"
    "        ;;\n"
    "    esac\n"
    "    return 0\n"
    "}\n"
    "complete -F _torchrun torchrun\n";

static void print_bash_values(FILE *to, const tddp_launch_flag *flag)
{
    static const char *const offers[] = {
        [TDDP_LAUNCH_OFFER_FILES] = "-f",
        [TDDP_LAUNCH_OFFER_FOLDERS] = "-d",
        [TDDP_LAUNCH_OFFER_HOSTS] = "-A hostname",
    };
    if (!takes_value(flag) || (!flag->choices && flag->offer == TDDP_LAUNCH_OFFER_NOTHING)) {
        return;
    }
    fputs("    ", to);
    print_forms(to, flag, "|");
    fputs(") COMPREPLY=($(compgen ", to);
    if (flag->choices) {
        fputs("-W $'", to);
        for (const char *at = flag->choices; *at != '\0'; at++) {
            fputs(*at == ' ' ? "\\n" : (char[]){*at, '\0'}, to);
        }
        fputs("'", to);
    } else {
        fputs(offers[flag->offer], to);
    }
    fputs(" -- \"$current\")) ;;\n", to);
}

static void print_bash(FILE *to)
{
    fputs("# bash completion for torchrun: source <(torchrun --print-completion bash)\n"
          "_torchrun_flags() {\n"
          "    printf '%s\\n'",
          to);
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        const tddp_launch_flag *flag = &tddp_launch_flags[i];
        const char *end = takes_value(flag) ? "=" : "";
        if (!tddp_launch_flag_is_long(flag)) {
            fprintf(to, " \\\n        -%c", flag->letter);
            continue;
        }
        fprintf(to, " \\\n        --%s%s", flag->name, end);
        if (flag->alias) {
            fprintf(to, " \\\n        --%s%s", flag->alias, end);
        }
    }
    fputs("\n}\n", to);
    fputs(bash_begin, to);
    print_forms_with_values(to, "|");
    fputs(bash_middle, to);
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        print_bash_values(to, &tddp_launch_flags[i]);
    }
    fputs(bash_end, to);
}

/* --- zsh ------------------------------------------------------------------------------------- */

static void print_zsh_form(FILE *to, const tddp_launch_flag *flag, const char *form)
{
    static const char *const offers[] = {
        [TDDP_LAUNCH_OFFER_NOTHING] = " ",
        [TDDP_LAUNCH_OFFER_FILES] = "_files",
        [TDDP_LAUNCH_OFFER_FOLDERS] = "_files -/",
        [TDDP_LAUNCH_OFFER_HOSTS] = "_hosts",
    };
    bool is_long = form[1] == '-';
    fputs(" \\\n        '(", to);
    print_forms(to, flag, " ");
    fprintf(to, ")%s%s[", form, !takes_value(flag) ? "" : is_long ? "=" : "+");
    print_summary(to, flag, "[]\\");
    fputs("]", to);
    if (takes_value(flag) && flag->choices) {
        fprintf(to, ":value:(%s)", flag->choices);
    } else if (takes_value(flag)) {
        fprintf(to, ":value:%s", offers[flag->offer]);
    }
    fputs("'", to);
}

static void print_zsh(FILE *to)
{
    fputs(
        "#compdef torchrun\n"
        "# zsh completion for torchrun: source <(torchrun --print-completion zsh), or as _torchrun "
        "in a folder of $fpath\n"
        "_torchrun() {\n"
        "    _arguments -S",
        to);
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        const tddp_launch_flag *flag = &tddp_launch_flags[i];
        char form[80];
        if (flag->letter) {
            (void)snprintf(form, sizeof form, "-%c", flag->letter);
            print_zsh_form(to, flag, form);
        }
        const char *names[] = {tddp_launch_flag_is_long(flag) ? flag->name : NULL, flag->alias};
        for (int k = 0; k < 2; k++) {
            if (names[k]) {
                (void)snprintf(form, sizeof form, "--%s", names[k]);
                print_zsh_form(to, flag, form);
            }
        }
    }
    fputs(" \\\n        '1:script:_files' \\\n        '*::argument:_files'\n"
          "}\n"
          "if [ \"$funcstack[1]\" = _torchrun ]; then\n"
          "    _torchrun \"$@\"\n"
          "else\n"
          "    compdef _torchrun torchrun\n"
          "fi\n",
          to);
}

/* --- fish ------------------------------------------------------------------------------------ */

static void print_fish_flag(FILE *to, const tddp_launch_flag *flag)
{
    static const char *const offers[] = {
        [TDDP_LAUNCH_OFFER_NOTHING] = "-x",
        [TDDP_LAUNCH_OFFER_FILES] = "-r -F",
        [TDDP_LAUNCH_OFFER_FOLDERS] = "-x -a '(__fish_complete_directories)'",
        [TDDP_LAUNCH_OFFER_HOSTS] = "-x -a '(__fish_print_hostnames)'",
    };
    const char *names[] = {tddp_launch_flag_is_long(flag) ? flag->name : NULL, flag->alias};
    for (int k = 0; k < 2; k++) {
        if (!names[k] && (k > 0 || !flag->letter)) {
            continue;
        }
        fputs("complete -c torchrun -n __torchrun_before_script", to);
        if (k == 0 && flag->letter) {
            fprintf(to, " -s %c", flag->letter);
        }
        if (names[k]) {
            fprintf(to, " -l %s", names[k]);
        }
        if (takes_value(flag) && flag->choices) {
            fprintf(to, " -x -a '%s'", flag->choices);
        } else if (takes_value(flag)) {
            fprintf(to, " %s", offers[flag->offer]);
        }
        fputs(" -d '", to);
        print_summary(to, flag, "\\");
        fputs("'\n", to);
    }
}

static void print_fish(FILE *to)
{
    fputs("# fish completion for torchrun: torchrun --print-completion fish | source\n"
          "function __torchrun_before_script\n"
          "    set -l words (commandline -opc)\n"
          "    set -e words[1]\n"
          "    set -l pending no\n"
          "    for word in $words\n"
          "        if test $pending = yes\n"
          "            set pending no\n"
          "            continue\n"
          "        end\n"
          "        switch (string replace -a _ - -- $word)\n"
          "            case --\n"
          "                return 1\n"
          "            case ",
          to);
    print_forms_with_values(to, " ");
    fputs("\n"
          "                set pending yes\n"
          "            case '-*'\n"
          "            case '*'\n"
          "                return 1\n"
          "        end\n"
          "    end\n"
          "    return 0\n"
          "end\n",
          to);
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        print_fish_flag(to, &tddp_launch_flags[i]);
    }
}

void tddp_launch_options_completion(const char *shell, FILE *to)
{
    if (strcmp(shell, "zsh") == 0) {
        print_zsh(to);
    } else if (strcmp(shell, "fish") == 0) {
        print_fish(to);
    } else {
        print_bash(to);
    }
}
