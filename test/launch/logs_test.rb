# frozen_string_literal: true

require "pty"
require_relative "launch_case"

# Log files beside and in place of the console: where they lie, and that they hold every byte.
class LogsTest < LaunchCase
  SAY = "echo out $RANK; echo err $RANK >&2"

  def logs
    File.join(@folder, "logs")
  end

  # The run's only folder in the log folder.
  def run_folder(folder = logs)
    runs = Dir.children(folder)
    assert_equal 1, runs.size, runs.inspect
    File.join(folder, runs.first)
  end

  # Every file of the run with its contents.
  def files(folder = run_folder)
    Dir.glob("**/*", base: folder).select { |name| File.file?("#{folder}/#{name}") }.sort
      .to_h { |name| [name, File.binread("#{folder}/#{name}")] }
  end

  # --- where files lie

  def test_the_layout_of_files
    result = run_torchrun("--nproc-per-node=2", "--log-dir=#{logs}", "--rdzv-id=job7", "--redirects=3", *shell(SAY))
    assert_code 0, result
    assert_equal ["", ""], [result.out, result.err]
    assert_match(%r{/job7_\h{16}\z}, run_folder)
    assert_equal({"attempt_0/0/stderr.log" => "err 0\n", "attempt_0/0/stdout.log" => "out 0\n",
                  "attempt_0/1/stderr.log" => "err 1\n", "attempt_0/1/stdout.log" => "out 1\n"}, files)
    assert_equal 0o644, File.stat("#{run_folder}/attempt_0/0/stdout.log").mode & 0o777
  end

  def test_streams_and_maps
    {"--redirects=1" => [[0, 1], [0, 2], [1, 1], [1, 2]].reject { |_, stream| stream == 2 },
     "--redirects=2" => [[0, 2], [1, 2]], "-r1:3" => [[1, 1], [1, 2]], "--redirects=0:1,1:2" => [[0, 1], [1, 2]],
     "--redirects=0:0" => []}.each do |flag, redirected|
      folder = "#{logs}#{flag.tr(":=,", "_")}"
      result = run_torchrun("--nproc-per-node=2", "--log-dir=#{folder}", flag, *shell(SAY))
      assert_code 0, result
      names = {1 => "stdout.log", 2 => "stderr.log"}
      assert_equal redirected.map { |rank, stream| "attempt_0/#{rank}/#{names[stream]}" }.sort, files(run_folder(folder)).keys, flag
      kept = [0, 1].product([1, 2]) - redirected
      assert_equal kept.select { |_, stream| stream == 1 }.map { |rank, _| "out #{rank}" }, result.out.lines(chomp: true).sort, flag
      assert_equal kept.select { |_, stream| stream == 2 }.map { |rank, _| "err #{rank}" }, result.err.lines(chomp: true).sort, flag
    end
  end

  def test_tee_writes_both_and_marks_lines_on_the_console
    result = run_torchrun("--nproc-per-node=2", "--log-dir=#{logs}", "--tee=0:3,1:1", *shell(SAY), env: {"PET_ROLE" => "trainer"})
    assert_code 0, result
    assert_equal "[trainer0]:out 0\n[trainer1]:out 1\n", result.out.lines.sort.join
    assert_equal "[trainer0]:err 0\nerr 1\n", result.err.lines.sort.join
    assert_equal({"attempt_0/0/stderr.log" => "err 0\n", "attempt_0/0/stdout.log" => "out 0\n", "attempt_0/1/stdout.log" => "out 1\n"}, files)
  end

  def test_without_a_log_folder_a_temporary_one_is_made_and_told
    @leaves_files = true
    result = run_torchrun("--redirects=1", *shell(SAY))
    assert_code 0, result
    folder = result.err[/^torchrun: logs are in (.+)$/, 1]
    assert folder&.start_with?("#{@temporary}/torchrun_"), result.err
    assert_equal({"attempt_0/0/stdout.log" => "out 0\n"}, files(folder))
  end

  def test_every_attempt_has_files_of_its_own
    result = run_torchrun("--nproc-per-node=2", "--max-restarts=2", "--log-dir=#{logs}", "--tee=1",
      *shell("echo attempt $TORCHELASTIC_RESTART_COUNT; test $TORCHELASTIC_RESTART_COUNT = 2"))
    assert_code 0, result
    found = files
    # Of a failed attempt the second worker may be ended before it speaks.
    3.times { |i| assert_includes found.values_at("attempt_#{i}/0/stdout.log", "attempt_#{i}/1/stdout.log"), "attempt #{i}\n" }
    assert_equal %w[attempt_0 attempt_1 attempt_2], Dir.children(run_folder).grep(/attempt/).sort
  end

  def test_error_files_are_in_the_layout
    result = run_torchrun("--log-dir=logs", *shell('cd /; echo \'{"message": "boom", "timestamp": 1}\' > $TORCHELASTIC_ERROR_FILE; exit 3'))
    assert_code 1, result
    assert_includes result.err, "boom"
    assert_equal ["attempt_0/0/error.json"], files.keys.grep(/error/)
  end

  def test_null_device_as_log_folder
    result = run_torchrun("--nproc-per-node=2", "--log-dir=/dev/null", "--redirects=2", "--tee=1", *shell(SAY))
    assert_code 0, result
    assert_equal ["[default0]:out 0\n", "[default1]:out 1\n"], result.out.lines.sort
    assert_equal "", result.err
  end

  def test_a_log_folder_that_cannot_be_made_is_said_before_anything_starts
    File.write("#{@folder}/file", "")
    {"#{@folder}/file" => "Not a directory", "#{@folder}/file/below" => "Not a directory", "/proc/logs" => "No such file"}.each do |folder, cause|
      result = run_torchrun("--log-dir=#{folder}", "--tee=3", *shell("echo started"))
      assert_code 1, result
      assert_equal "", result.out
      assert_match(/\Atorchrun: cannot make (?:a folder in|the folder) #{folder}\S*: #{cause}.*\n\z/, result.err)
    end
  end

  # --- prefixes and filters

  def test_a_template_marks_all_lines
    template = "${hostname}/${role_name}/${rank}.$local_rank$$ ${other} "
    result = run_torchrun("--nproc-per-node=2", "--log-line-prefix-template", template, *shell(SAY))
    expected = (0..1).map { |i| "#{Socket.gethostname}/default/#{i}.#{i}$ ${other} " }
    assert_equal expected.each_with_index.map { |text, i| "#{text}out #{i}\n" }, result.out.lines.sort
    assert_equal expected.each_with_index.map { |text, i| "#{text}err #{i}\n" }, result.err.lines.sort
    result = run_torchrun("--tee=1", "--log-dir=#{logs}", *shell(SAY), env: {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE" => "<${rank}>"})
    assert_equal "<0>out 0\n", result.out
    assert_equal ["out 0\n"], files.values
  end

  def test_a_ranks_filter_is_for_the_console_alone
    result = run_torchrun("--nproc-per-node=3", "--log-dir=#{logs}", "--tee=1", "--local-ranks-filter=1,2", *shell(SAY))
    assert_code 0, result
    assert_equal %w[[default1]:out\ 1 [default2]:out\ 2], result.out.lines(chomp: true).sort
    assert_equal ["err 1", "err 2"], result.err.lines(chomp: true).sort
    assert_equal ["out 0\n", "out 1\n", "out 2\n"], files.values
    # Whoever is alone on the console passes as it is.
    assert_equal "end", run_torchrun("--nproc-per-node=3", "--local-ranks-filter=1", *shell("printf end")).out
  end

  def test_filtered_logs
    code = 'echo "step 1 rank $RANK"; echo "loss 0.5"; echo "a,b"; printf "x loss"; echo "loss on err" >&2'
    result = run_torchrun("--nproc-per-node=2", "--log-dir=#{logs}", "--duplicate-stdout-filters=loss,a,,b", "--duplicate-stderr-filters=err",
      "--redirects=1", "--local-ranks-filter=0", *shell(code))
    assert_code 0, result
    assert_equal "", result.out
    assert_equal "loss on err\n", result.err
    found = files
    lines = ["loss 0.5", "a,b", "x loss"]
    2.times { |i| assert_equal lines.map { |line| "[default#{i}]:#{line}\n" }, found["attempt_0/filtered_stdout.log"].lines.grep(/default#{i}/) }
    assert_equal 6, found["attempt_0/filtered_stdout.log"].lines.size
    assert_equal 2.times.map { |i| "[default#{i}]:loss on err\n" }, found["attempt_0/filtered_stderr.log"].lines.sort
    assert_equal "step 1 rank 1\nloss 0.5\na,b\nx loss", found["attempt_0/1/stdout.log"]
  end

  # What a terminal shows of a run; the block is given all that has been shown, whenever there is more.
  def on_terminal(*arguments)
    text = +""
    PTY.spawn(environment({"TERM" => "xterm"}), BINARY, *arguments, chdir: @folder) do |reader, _, pid|
      loop do
        text << reader.readpartial(4096)
        yield text if block_given?
      end
    rescue Errno::EIO, EOFError
      Process.wait(pid)
    end
    text.delete("\r").lines(chomp: true).sort
  end

  def test_several_workers_have_prefixes_on_a_terminal
    say = ["--nproc-per-node=2", *shell("echo a; echo; printf b >&2")]
    marked = 2.times.flat_map { |i| ["", "a", "b"].map { |text| "[default#{i}]:#{text}" } }
    assert_equal marked, on_terminal(*say)
    assert_equal marked.map { |line| line.sub(/.*:/, "") }.uniq, on_terminal("--local-ranks-filter=1", *say)
    assert_equal ["", "a", "b"], on_terminal(*say.drop(1))
  end

  def test_a_progress_bar_shows_on_a_terminal
    bar = 'for i in 1 2 3; do printf "\r%s of 3" $i; until [ -e shown$i ]; do sleep 0.02; done; done; echo; echo over'
    lines = on_terminal("--log-dir=#{logs}", "--tee=1", *shell(bar)) do |text|
      text.scan(/(\d) of 3/).flatten.each { |number| FileUtils.touch("#{@folder}/shown#{number}") }
    end
    # Without the carriage returns: the prefix comes again after each.
    assert_equal ["[default0]:[default0]:1 of 3[default0]:2 of 3[default0]:3 of 3", "[default0]:over"], lines.map { |line| line.sub(/(3 of 3).*/, '\1') }
    assert_equal "\r1 of 3\r2 of 3\r3 of 3\nover\n", files["attempt_0/0/stdout.log"]
  end

  # --- no byte is lost

  def test_every_byte_of_sixteen_workers_is_in_the_files_and_on_the_console
    code = <<~RUBY
      rank = ENV["RANK"]
      1000.times do |i|
        line = "\#{rank}:\#{i}:" + rank[-1] * (i * 7 % 300) + "\\n"
        cut = i * 13 % line.size
        [$stdout, $stderr].each { |io| io.syswrite(line[0, cut]); io.syswrite(line[cut..]) }
      end
    RUBY
    result = run_torchrun("--nproc-per-node=16", "--tee=3", "--log-dir=#{logs}", *ruby(code))
    assert_code 0, result
    expected = 16.times.map { |rank| 1000.times.map { |i| "#{rank}:#{i}:" + rank.to_s[-1] * (i * 7 % 300) + "\n" } }
    found = files
    [["stdout", result.out], ["stderr", result.err]].each do |name, shown|
      by_rank = shown.lines.group_by { |line| line[/\A\[default(\d+)\]:/, 1] }
      16.times do |rank|
        assert found["attempt_0/#{rank}/#{name}.log"] == expected[rank].join, "#{name} of #{rank}"
        assert by_rank.delete(rank.to_s)&.map { |line| line.sub(/\A\[default\d+\]:/, "") } == expected[rank], "lines of #{rank}"
      end
      assert_empty by_rank
    end
  end

  def test_bytes_of_any_kind
    code = <<~RUBY
      $stdout.binmode
      $stdout.write((0..255).to_a.pack("C*") * 3, "\\n\\n", ENV["RANK"] * 3_000_000, "\\n", "\\0\\0\\n", "end")
    RUBY
    result = run_torchrun("--nproc-per-node=2", "--log-dir=#{logs}", "--tee=1", *ruby(code))
    assert_code 0, result
    shown = result.out.b.lines.group_by { |line| line[/\A\[default(\d)\]:/, 1] }
    2.times do |rank|
      bytes = ((0..255).to_a.pack("C*") * 3 + "\n\n" + rank.to_s * 3_000_000 + "\n\0\0\nend").b
      assert files["attempt_0/#{rank}/stdout.log"].b == bytes
      assert shown.delete(rank.to_s).join == "#{bytes}\n".lines.map { |line| "[default#{rank}]:".b + line }.join
    end
    assert_empty shown
  end

  def test_a_worker_killed_within_a_line
    result = run_torchrun("--nproc-per-node=2", "--log-dir=#{logs}", "--tee=1",
      *shell("printf 'half a line of %s' $RANK; : > said$RANK; until test -e said0; do sleep 0.05; done; test $RANK = 1 && kill -9 $$; #{IDLE}"))
    assert_code 1, result
    assert_equal "[default0]:half a line of 0\n[default1]:half a line of 1\n", result.out.lines.sort.join
    assert_equal ["half a line of 0", "half a line of 1"], files.values
  end

  def test_what_a_workers_child_writes_after_its_end
    run = start("--nproc-per-node=2", "--log-dir=#{logs}", "--tee=1", "--redirects=2",
      *shell("if test $RANK = 0; then (while kill -0 $$ 2> /dev/null; do sleep 0.02; done; echo later >&2; echo late) & exit 0; fi; #{IDLE}"))
    run.await(/late$/)
    run.signal(:TERM)
    run.finish
    assert_equal "late\n", files["attempt_0/0/stdout.log"]
    assert_equal "later\n", files["attempt_0/0/stderr.log"]
  end

  def test_a_reader_that_does_not_read_holds_up_only_what_goes_to_it
    reader, writer = IO.pipe
    run = start("--nproc-per-node=2", "--log-dir=#{logs}", "--tee=0:1", "--redirects=1:1", "--duplicate-stdout-filters=line 39999",
      *ruby('40_000.times { |i| puts "line " + i.to_s + "." * 50 }'), out: writer)
    writer.close
    whole = (0...40_000).map { |i| "line #{i}#{"." * 50}\n" }.join
    eventually("the other worker's last line") { Dir["#{logs}/*/attempt_0/1/stdout.log"].any? { |path| File.size(path) == whole.size } }
    text = reader.read
    assert_code 0, run.finish
    assert_equal 40_000, text.lines.size
    assert text.gsub("[default0]:", "") == whole
    assert(2.times.all? { |rank| files["attempt_0/#{rank}/stdout.log"] == whole })
    assert_equal 2, files["attempt_0/filtered_stdout.log"].lines.size
  ensure
    reader&.close
  end

  def test_a_reader_that_goes_away_ends_the_job_and_leaves_the_log
    reader, writer = IO.pipe
    run = start("--nproc-per-node=2", "--log-dir=#{logs}", "--tee=1", *shell("while :; do echo line; done"), out: writer)
    writer.close
    reader.readpartial(100)
    reader.close
    assert_code 141, run.finish
    assert_equal ["line\n"], files.values.join.lines.uniq
  end

  def test_a_killed_torchrun_leaves_whole_redirected_logs
    run = start("--log-dir=#{logs}", "--redirects=3", *shell("i=0; while test $i -lt 2000; do i=$((i+1)); echo line $i; done; exec sleep 600"))
    eventually("all lines") { Dir["#{logs}/**/stdout.log"].any? { |path| File.read(path).include?("line 2000\n") } }
    run.abandon
    assert_equal (1..2000).map { |i| "line #{i}\n" }.join, files["attempt_0/0/stdout.log"]
    @leaves_files = true
  end

  def test_an_endless_line_costs_bounded_memory
    run = start("--nproc-per-node=2", "--log-dir=#{logs}", "--tee=1", "--duplicate-stdout-filters=y",
      *shell("head -c 40000000 /dev/zero; echo; echo y; exec sleep 30"))
    eventually("both ends") { Dir["#{logs}/*/attempt_0/filtered_stdout.log"].any? { |path| File.size(path) == "[default0]:y\n".size * 2 } }
    peak = marked.filter_map { |pid| File.read("/proc/#{pid}/status")[/VmHWM:\s+(\d+)/, 1] if command_line(pid).include?("--tee=1") }.map(&:to_i).max
    assert_operator peak, :<, 150_000, "kB" unless File.binread(BINARY).include?("__asan_init")
    run.signal(:TERM)
    result = run.finish
    whole = ("\0" * 40_000_000 + "\ny\n").b
    assert(2.times.all? { |rank| files["attempt_0/#{rank}/stdout.log"] == whole })
    assert_equal 80_000_000, result.out.count("\0")
    assert_equal "[default0]:y\n[default1]:y\n", files["attempt_0/filtered_stdout.log"].lines.sort.join
  end

  # --- places that are full

  FULL = "i=0; while test $i -lt 2000; do i=$((i+1)); echo line $i; done; echo fine >&2"

  # A limit on files' sizes stands for a full disk.
  def test_a_file_that_cannot_grow_is_said_once_and_ends_nobody
    result = run_torchrun("--nproc-per-node=2", "--log-dir=#{logs}", "--tee=1", "--redirects=0:2", *shell(FULL), rlimit_fsize: 10_000)
    assert_code 0, result
    assert_equal (1..2000).flat_map { |i| 2.times.map { |rank| "[default#{rank}]:line #{i}\n" } }.sort, result.out.lines.sort
    assert_equal 2, result.err.scan(/^torchrun: .*stdout.log: File too large; what cannot be written there is lost$/).size
    assert_equal 3, result.err.lines.size
    assert_equal "fine\n", files["attempt_0/0/stderr.log"]
    2.times { |rank| assert (1..2000).map { |i| "line #{i}\n" }.join.start_with?(files["attempt_0/#{rank}/stdout.log"]) }
  end

  # Runs torchrun with a small file system as its log folder, of which only this run knows; what is there at the end is
  # copied to `logs`.
  def start_on_small_disk(options, *arguments, before: "true")
    allowed = system("unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt", out: File::NULL, err: File::NULL)
    skip "no file system may be mounted here" unless allowed
    Dir.mkdir("#{@folder}/disk")
    script = "mount -t tmpfs -o #{options} none disk && #{before} && \"$@\"; status=$?; cp -r disk logs; exit $status"
    start("-m", "sh", "-c", script, "sh", BINARY, "--log-dir=disk", *arguments, command: ["unshare"])
  end

  def on_small_disk(...)
    start_on_small_disk(...).finish
  end

  def test_a_full_disk_and_room_again
    # Both write more than there is room for; once torchrun has all of that, there is room for what comes.
    code = <<~SH
      i=0
      while test $i -lt 6000; do i=$((i+1)); echo "line $i of sixty-four bytes or so ............................."; done
      until test -e go; do sleep 0.05; done
      test $RANK = 0 && rm disk/ballast
      while test -e disk/ballast; do sleep 0.05; done
      while test $i -lt 7000; do i=$((i+1)); echo "line $i"; done
    SH
    run = start_on_small_disk("size=512k", "--nproc-per-node=2", "--tee=1", "--redirects=2", *shell(code), before: "head -c 400000 /dev/zero > disk/ballast")
    run.await(/(line 6000 .*){2}/m)
    File.write("#{@folder}/go", "")
    result = run.finish
    assert_code 0, result
    shown = 2.times.map { |rank| result.out.lines.grep(/\A\[default#{rank}\]:/).map { |line| line.sub(/.*?:/, "") } }
    assert_equal shown[0], shown[1]
    assert_equal (1..7000).to_a, shown[0].map { |line| line[/\d+/].to_i }
    assert_match(/\A(torchrun: \S+stdout.log: No space left on device; what cannot be written there is lost\n){1,2}\z/, result.err)
    2.times do |rank|
      # Where something is missing a line may break off; all others are whole, and in their order.
      lines = files["attempt_0/#{rank}/stdout.log"].lines
      assert_operator lines.size, :<, 7000
      assert_equal "line 7000\n", lines.last
      numbers = (lines & shown[0]).map { |line| line[/\d+/].to_i }
      assert_equal numbers.sort, numbers
      assert_operator (lines - shown[0]).size, :<, 50
    end
  end

  # What it writes is not torchrun's to lose.
  def test_a_redirected_worker_is_told_of_a_full_disk
    result = on_small_disk("size=64k", "--redirects=1", *shell("i=0; while echo line $i; do i=$((i+1)); done 2> /dev/null; echo told >&2; exit 7"))
    assert_code 1, result
    assert_match(/\Atold\ntorchrun: .* FAILED: rank 0, exit code 7$/, result.err)
    assert files["attempt_0/0/stdout.log"].start_with?("line 0\nline 1\n")
  end

  def test_where_no_file_can_be_made_the_console_has_it_all
    # The disk, the run's, the attempt's and both workers' folders, and one file.
    result = on_small_disk("nr_inodes=6", "--nproc-per-node=2", "--redirects=1", *shell("echo out $RANK"))
    assert_code 0, result
    assert_match(/^torchrun: \S+stdout.log: No space left on device: what it would hold is shown here$/, result.err)
    assert_equal "out 1\n", result.out
    assert_equal({"attempt_0/0/stdout.log" => "out 0\n"}, files)
  end

  def test_where_no_folder_can_be_made_the_console_has_it_all
    result = on_small_disk("nr_inodes=5", "--nproc-per-node=2", "--redirects=1", "--max-restarts=1",
      *shell("echo out $RANK $TORCHELASTIC_RESTART_COUNT; test $TORCHELASTIC_RESTART_COUNT = 1 || exit 1"))
    assert_code 0, result
    assert_equal 2, result.err.scan(/attempt_0.*: what it would hold is shown here$/).size, result.err
    assert_equal 1, result.err.scan(/attempt_1: No space left on device: there are no logs and error files of this attempt$/).size, result.err
    assert_equal ["out 0 1\n", "out 1 1\n"], result.out.lines.grep(/ 1$/).sort
  end
end
